#include "rows/row_rule.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sqrt.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "cpu/spans.h"
#include "math/sparse_adam.h"
#include "rows/checks.h"

namespace zx {
namespace {

constexpr int64_t kElementsARoot = 8192;  // few enough for the cache

// One row each. The rule comes as a copy, which no store can change: so the loops become vectors.
void advance_row(const SparseAdam rule, const float* __restrict grad, float factor, float* __restrict exp_avg,
                 float* __restrict exp_avg_sq, float* __restrict root, int64_t width) {
  for (int64_t k = 0; k < width; ++k) {
    float mean = exp_avg[k];
    float square = exp_avg_sq[k];
    rule.advance(grad[k] * factor, mean, square);
    exp_avg[k] = mean;
    exp_avg_sq[k] = square;
    root[k] = square;
  }
}

// As torch's clamp(): NaN stays.
void cut_row(const float* __restrict grad, float factor, float limit, float* __restrict cut, int64_t width) {
  for (int64_t k = 0; k < width; ++k) {
    const float scaled = grad[k] * factor;
    cut[k] = scaled > limit ? limit : scaled < -limit ? -limit : scaled;
  }
}

void move_row(const SparseAdam rule, const float* __restrict exp_avg, const float* __restrict root,
              float* __restrict param, int64_t width) {
  for (int64_t k = 0; k < width; ++k) param[k] = rule.moved(param[k], exp_avg[k], root[k]);
}

void prefetch(const TouchedRows& touched, int64_t i) {
  for (float* state : touched.states) {
    if (state != nullptr) prefetch_row(state + touched.places[i] * touched.width, touched.width);
  }
  prefetch_row(touched.values + touched.rows[i] * touched.width, touched.width);
}

void copy_updated(const TouchedRows& touched, int64_t i, float* updated) {
  if (updated == nullptr) return;
  const float* value = touched.values + touched.rows[i] * touched.width;
  std::memcpy(updated + i * touched.width, value, static_cast<size_t>(touched.width) * sizeof(float));
}

void update_by_sparse_adam(const Adam::Options& options, const RowRule& by, int64_t step, const TouchedRows& touched,
                           float* updated) {
  const int64_t width = touched.width;
  const SparseAdam rule = SparseAdam::of(options.lr, options.beta1, options.beta2, options.eps, step);
  const auto factor = static_cast<float>(options.maximize != 0.0 ? -by.scale : by.scale);
  const auto limit = static_cast<float>(by.limit);
  const bool is_cut = std::isfinite(limit);
  const auto [first, second, none] = touched.states;
  const int64_t most = std::max<int64_t>(1, kElementsARoot / width);  // rows whose roots are taken together
  parallel_units(touched.count, touched.count * width, [&](int64_t from, int64_t to) {
    at::Tensor of_most = at::empty({std::min(most, to - from), width}, at::kFloat);
    auto* const roots = of_most.mutable_data_ptr<float>();
    std::vector<float> cut(is_cut ? width : 0);
    for (int64_t start = from; start < to; start += most) {
      const int64_t stop = std::min(start + most, to);
      for (int64_t i = start; i < stop; ++i) {
        if (i + kAhead < to) prefetch(touched, i + kAhead);
        const float* grads = touched.grads + i * width;
        if (is_cut) cut_row(grads, factor, limit, cut.data(), width);
        const int64_t state = touched.places[i] * width;
        advance_row(rule, is_cut ? cut.data() : grads, is_cut ? 1.0F : factor, first + state, second + state,
                    roots + (i - start) * width, width);
      }
      at::Tensor squares = of_most.narrow(0, 0, stop - start);
      at::sqrt_(squares);
      for (int64_t i = start; i < stop; ++i) {
        move_row(rule, first + touched.places[i] * width, roots + (i - start) * width,
                 touched.values + touched.rows[i] * width, width);
        copy_updated(touched, i, updated);
      }
    }
  });
}

// Each row is a parameter of its own for the kernel of dense ones.
template <class Rule>
void update_by_kernel(const typename Rule::Options& options, const RowRule& by, int64_t step,
                      const TouchedRows& touched, float* updated) {
  const int64_t width = touched.width;
  const auto limit = static_cast<float>(by.limit);
  const bool is_cut = std::isfinite(limit);
  const auto folded = Rule::fold(options, step, is_cut ? 1.0 : by.scale);
  parallel_units(touched.count, touched.count * width, [&](int64_t from, int64_t to) {
    std::vector<float> cut(is_cut ? width : 0);
    for (int64_t i = from; i < to; ++i) {
      if (i + kAhead < to) prefetch(touched, i + kAhead);
      const float* grads = touched.grads + i * width;
      if (is_cut) cut_row(grads, static_cast<float>(by.scale), limit, cut.data(), width);
      UpdateSpan span{};
      span.rule = by.kind;
      span.param_dtype = span.grad_dtype = DType::f32;
      span.param = touched.values + touched.rows[i] * width;
      span.grad = is_cut ? cut.data() : grads;
      span.num_states = Rule::num_states(options);
      for (int s = 0; s < span.num_states; ++s) {
        span.states.at[s].values = touched.states[s] + touched.places[i] * width;
      }
      span.numel = width;
      kernels().update(span, &folded);
      copy_updated(touched, i, updated);
    }
  });
}

}  // namespace

RowRule RowRule::named(const std::string& name, std::vector<double> options, double scale, double limit) {
  const RuleFacts& rule = rule_named(name, "RowRule");
  TORCH_CHECK_VALUE(static_cast<int64_t>(options.size()) == rule.option_columns, "zerox: the rule ", name, " has ",
                    rule.option_columns, " options, got ", options.size());
  return {rule.kind, std::move(options), scale, limit};
}

void update_rows(const RowRule& by, const std::vector<at::Tensor>& states, const at::Tensor& step, TouchedRows touched,
                 float* updated) {
  with_rule(by.kind, [&](auto type) {
    using Rule = typename decltype(type)::type;
    typename Rule::Options options;
    std::memcpy(&options, by.options.data(), sizeof(options));
    const auto needed = static_cast<size_t>(Rule::num_states(options));
    TORCH_CHECK_VALUE(states.size() >= needed, "zerox: a table has ", states.size(), " states, and its rule needs ",
                      needed);
    for (size_t s = 0; s < needed; ++s) touched.states[s] = states[s].mutable_data_ptr<float>();
    auto* const count = step.mutable_data_ptr<int64_t>();
    if (Rule::counts_step(options)) ++*count;
    if constexpr (std::is_same_v<Rule, Adam>) {
      update_by_sparse_adam(options, by, *count, touched, updated);
    } else {
      update_by_kernel<Rule>(options, by, *count, touched, updated);
    }
  });
}

}  // namespace zx
