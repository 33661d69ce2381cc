#include "rows/row_rule.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sqrt.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "cpu/spans.h"
#include "math/scalar_lane.h"
#include "math/sparse_adam.h"
#include "rows/checks.h"

namespace zx {
namespace {

constexpr int64_t kElementsARoot = 8192;  // few enough for the cache

// One row each. The rule comes as a copy, which no store can change: so the loops become vectors.
void advance_row(const SparseAdam rule, const float* __restrict grad, float factor, float* __restrict means,
                 float* __restrict squares, float* __restrict root, int64_t width) {
  for (int64_t k = 0; k < width; ++k) {
    float mean = means[k];
    float square = squares[k];
    rule.advance(grad[k] * factor, mean, square);
    means[k] = mean;
    squares[k] = square;
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

void move_row(const SparseAdam rule, const float* __restrict means, const float* __restrict root,
              float* __restrict param, int64_t width) {
  for (int64_t k = 0; k < width; ++k) param[k] = rule.moved(param[k], means[k], root[k]);
}

// The same of 16 bits, with or without a master.
template <class Half>
void move_half(const SparseAdam rule, const float* __restrict means, const float* __restrict root,
               Half* __restrict param, int64_t width) {
  for (int64_t k = 0; k < width; ++k) {
    const auto value = ScalarLane<float>::load(param + k);
    ScalarLane<float>{rule.moved(value.x, means[k], root[k])}.store(param + k);
  }
}
template <class Half>
void move_mastered(const SparseAdam rule, const float* __restrict means, const float* __restrict root,
                   Half* __restrict param, float* __restrict master, int64_t width) {
  for (int64_t k = 0; k < width; ++k) {
    const auto value = ScalarLane<float>::load_master(param + k, master + k);
    master[k] = rule.moved(value.x, means[k], root[k]);
    ScalarLane<float>{master[k]}.store(param + k);
  }
}
void move_split(const SparseAdam rule, const float* __restrict means, const float* __restrict root,
                bf16* __restrict param, int16_t* __restrict remainder, int64_t width) {
  for (int64_t k = 0; k < width; ++k) {
    const auto value = ScalarLane<float>::load_split(param + k, remainder + k);
    ScalarLane<float>{rule.moved(value.x, means[k], root[k])}.store_split(param + k, remainder + k);
  }
}

template <class Half>
void move_16_bits(const SparseAdam rule, const float* means, const float* root, const TouchedRows& touched, int64_t i) {
  auto* const param = reinterpret_cast<Half*>(touched.value(i));
  void* const master = touched.master_of(i);
  if (touched.master_kind == Master::none) return move_half(rule, means, root, param, touched.width);
  if constexpr (std::is_same_v<Half, bf16>) {
    if (touched.master_kind == Master::remainder) {
      return move_split(rule, means, root, param, static_cast<int16_t*>(master), touched.width);
    }
  }
  move_mastered(rule, means, root, param, static_cast<float*>(master), touched.width);
}

void move_any(const SparseAdam rule, const float* means, const float* root, const TouchedRows& touched, int64_t i) {
  switch (touched.dtype) {
    case DType::f64:
      break;  // refused at the door
    case DType::f32:
      return move_row(rule, means, root, reinterpret_cast<float*>(touched.value(i)), touched.width);
    case DType::bf16:
      return move_16_bits<bf16>(rule, means, root, touched, i);
    case DType::f16:
      return move_16_bits<f16>(rule, means, root, touched, i);
  }
  __builtin_unreachable();
}

void prefetch(const TouchedRows& touched, const RowStates& states, int64_t i) {
  for (const at::Tensor& values : states.values) {
    const auto bytes = touched.width * static_cast<int64_t>(values.element_size());
    prefetch_row(static_cast<const char*>(values.const_data_ptr()) + touched.places[i] * bytes, bytes);
  }
  prefetch_row(touched.value(i), touched.row_bytes());
}

void copy_updated(const TouchedRows& touched, int64_t i, void* updated) {
  if (updated == nullptr) return;
  const int64_t bytes = touched.row_bytes();
  std::memcpy(static_cast<char*>(updated) + i * bytes, touched.value(i), static_cast<size_t>(bytes));
}

void update_by_sparse_adam(const Adam::Options& options, const RowRule& by, int64_t step, const RowStates& states,
                           const TouchedRows& touched, void* updated) {
  const int64_t width = touched.width;
  const SparseAdam rule = SparseAdam::of(options.lr, options.beta1, options.beta2, options.eps, step);
  const auto factor = static_cast<float>(options.maximize != 0.0 ? -by.scale : by.scale);
  const auto limit = static_cast<float>(by.limit);
  const bool is_cut = std::isfinite(limit);
  auto* const first = states.values[0].data_ptr<float>();
  auto* const second = states.values[1].data_ptr<float>();
  const int64_t most = std::max<int64_t>(1, kElementsARoot / width);  // rows whose roots are taken together
  parallel_units(touched.count, touched.count * width, [&](int64_t from, int64_t to) {
    at::Tensor of_most = at::empty({std::min(most, to - from), width}, at::kFloat);
    auto* const roots = of_most.mutable_data_ptr<float>();
    std::vector<float> cut(is_cut ? width : 0);
    for (int64_t start = from; start < to; start += most) {
      const int64_t stop = std::min(start + most, to);
      for (int64_t i = start; i < stop; ++i) {
        if (i + kAhead < to) prefetch(touched, states, i + kAhead);
        const float* grads = touched.grads + i * width;
        if (is_cut) cut_row(grads, factor, limit, cut.data(), width);
        const int64_t state = touched.places[i] * width;
        advance_row(rule, is_cut ? cut.data() : grads, is_cut ? 1.0F : factor, first + state, second + state,
                    roots + (i - start) * width, width);
      }
      at::Tensor squares = of_most.narrow(0, 0, stop - start);
      at::sqrt_(squares);
      for (int64_t i = start; i < stop; ++i) {
        move_any(rule, first + touched.places[i] * width, roots + (i - start) * width, touched, i);
        copy_updated(touched, i, updated);
      }
    }
  });
}

// Each row is a parameter of its own for the kernel of dense ones, but for the random bits of its elements, which are
// those of the table.
template <class Rule>
void update_by_kernel(const typename Rule::Options& options, const RowRule& by, int64_t step, const RowStates& states,
                      const TouchedRows& touched, const int64_t* numbers, void* updated) {
  const int64_t width = touched.width;
  const StateKind kind = states.kind;
  const int64_t row_bytes = states.values.empty() ? 0 : width * static_cast<int64_t>(states.values[0].element_size());
  const RandomKey random = random_key(step, states.table);
  const auto limit = static_cast<float>(by.limit);
  const bool is_cut = std::isfinite(limit);
  const auto folded = Rule::fold(options, step, is_cut ? 1.0 : by.scale);
  parallel_units(touched.count, touched.count * width, [&](int64_t from, int64_t to) {
    std::vector<float> cut(is_cut ? width : 0);
    for (int64_t i = from; i < to; ++i) {
      if (i + kAhead < to) prefetch(touched, states, i + kAhead);
      const float* grads = touched.grads + i * width;
      if (is_cut) cut_row(grads, static_cast<float>(by.scale), limit, cut.data(), width);
      UpdateSpan span{};
      span.rule = by.kind;
      span.param_dtype = touched.dtype;
      span.master_kind = touched.master_kind;
      span.grad_dtype = DType::f32;
      span.param = touched.value(i);
      span.master = touched.master_of(i);
      span.grad = is_cut ? cut.data() : grads;
      span.num_states = Rule::num_states(options);
      span.states.kind = kind;
      for (int s = 0; s < span.num_states; ++s) {
        span.states.at[s].values = static_cast<char*>(states.values[s].data_ptr()) + touched.places[i] * row_bytes;
        if (kind != StateKind::blockwise) continue;
        span.states.at[s].scales =
            states.scales[s].template data_ptr<float>() + touched.places[i] * num_state_blocks(width);
      }
      span.numel = width;
      span.random = {numbers[i] * width, random};
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

RowStates RowStates::of(std::vector<at::Tensor> values, std::vector<at::Tensor> scales, int64_t table) {
  const auto dtype = values.empty() ? at::kFloat : values[0].scalar_type();
  return {std::move(values), std::move(scales), table, state_kind_of(dtype, "RowTables", "states")};
}

void RowStates::check(int64_t num_rows, int64_t width) const {
  for (const at::Tensor& each : values) {
    ZX_CHECK_DTYPE(each, values[0].scalar_type(), "RowTables", "states");
    check_shape(each, num_rows, width, "states");
  }
  const size_t expected = kind == StateKind::blockwise ? values.size() : 0;
  ZX_CHECK(scales.size() == expected, "RowTables", "scales", "must be ", expected, " tensors, got ", scales.size());
  for (const at::Tensor& each : scales) check_values(each, num_rows, num_state_blocks(width), "scales");
}

void update_rows(const RowRule& by, const RowStates& states, const at::Tensor& step, TouchedRows touched,
                 const int64_t* numbers, void* updated) {
  with_rule(by.kind, [&](auto type) {
    using Rule = typename decltype(type)::type;
    typename Rule::Options options;
    std::memcpy(&options, by.options.data(), sizeof(options));
    const auto needed = static_cast<size_t>(Rule::num_states(options));
    TORCH_CHECK_VALUE(states.values.size() >= needed, "zerox: a table has ", states.values.size(),
                      " states, and its rule needs ", needed);
    auto* const count = step.mutable_data_ptr<int64_t>();
    if (Rule::counts_step(options)) ++*count;
    if constexpr (std::is_same_v<Rule, Adam>) {
      if (states.kind == StateKind::wide) return update_by_sparse_adam(options, by, *count, states, touched, updated);
    }
    update_by_kernel<Rule>(options, by, *count, states, touched, numbers, updated);
  });
}

}  // namespace zx
