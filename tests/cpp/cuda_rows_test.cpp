// The CUDA update of rows, run on the host: the bits of the CPU's kernels, row by row, over all rules, widths,
// alignments and orders of threads.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string_view>

#include "cpu/isa.h"
#include "cuda_shards.h"
#include "math/sparse_adam.h"
#include "rule_cases.h"

namespace {

using namespace zx::testing;
using zx::Adam;

constexpr double kNoLimit = HUGE_VAL;

// A table of which some rows are touched, in any order; the states' rows are in another order.
struct Table {
  Table(int64_t num_rows, int64_t width, int64_t shift) : width(width), shift(shift) {
    std::mt19937 random(static_cast<unsigned>(num_rows * 131 + width));
    std::normal_distribution<float> normal;
    rows.resize(static_cast<size_t>(num_rows));
    std::iota(rows.begin(), rows.end(), 0);
    places = rows;
    std::shuffle(rows.begin(), rows.end(), random);
    std::shuffle(places.begin(), places.end(), random);
    rows.resize(static_cast<size_t>(num_rows * 3 / 4));
    places.resize(rows.size());
    const auto fill = [&](std::vector<float>& into, size_t count) {
      into.resize(count * static_cast<size_t>(width) + static_cast<size_t>(shift));
      for (float& each : into) each = normal(random);
    };
    fill(grads, rows.size());
    fill(values, static_cast<size_t>(num_rows));
    for (auto& state : states) {
      fill(state, static_cast<size_t>(num_rows));
      for (float& each : state) each = std::fabs(each);
    }
    grads[static_cast<size_t>(shift)] = std::numeric_limits<float>::quiet_NaN();
    grads.back() = std::numeric_limits<float>::infinity();
  }

  float* row(std::vector<float>& of, int64_t number) const { return of.data() + shift + number * width; }

  int64_t width;
  int64_t shift;  // of all arrays from a multiple of 16 bytes
  std::vector<int64_t> rows;
  std::vector<int64_t> places;
  std::vector<float> grads;
  std::vector<float> values;
  std::array<std::vector<float>, zx::kMostStates> states;
};

template <class Rule>
constexpr zx::RuleKind kind_of() {
  for (const zx::RuleFacts& rule : zx::kRules) {
    if (rule.name == std::string_view(Rule::kName)) return rule.kind;
  }
  throw "a rule without a kind";
}

template <class Rule>
void run_cuda(Table& t, const typename Rule::Options& options, int64_t step, double scale, double limit) {
  zx::cuda::RowUpdate update{kind_of<Rule>(),
                             &options.lr,
                             step,
                             scale,
                             limit,
                             static_cast<int64_t>(t.rows.size()),
                             t.width,
                             t.rows.data(),
                             t.places.data(),
                             t.row(t.grads, 0),
                             t.row(t.values, 0),
                             {}};
  for (int s = 0; s < Rule::num_states(options); ++s) update.states[s] = t.row(t.states[s], 0);
  CHECK_EQ(zx::cuda::update_rows(update, kHost), 0);
}

float limited(float grad, double scale, double limit) {
  const auto scaled = grad * static_cast<float>(scale);
  const auto most = static_cast<float>(limit);
  return scaled > most ? most : scaled < -most ? -most : scaled;
}

// Each row as a parameter of its own of the CPU's kernel.
template <class Rule>
void run_cpu(Table& t, const typename Rule::Options& options, int64_t step, double scale, double limit) {
  const bool is_cut = std::isfinite(limit);
  const auto folded = Rule::fold(options, step, is_cut ? 1.0 : scale);
  for (size_t i = 0; i < t.rows.size(); ++i) {
    std::vector<float> grad(t.row(t.grads, static_cast<int64_t>(i)), t.row(t.grads, static_cast<int64_t>(i)) + t.width);
    for (float& each : grad) each = is_cut ? limited(each, scale, limit) : each;
    zx::UpdateSpan span{};
    span.rule = kind_of<Rule>();
    span.param_dtype = span.grad_dtype = zx::DType::f32;
    span.param = t.row(t.values, t.rows[i]);
    span.grad = grad.data();
    span.num_states = Rule::num_states(options);
    for (int s = 0; s < span.num_states; ++s) span.states.at[s].values = t.row(t.states[s], t.places[i]);
    span.numel = t.width;
    zx::kernels_scalar().update(span, &folded);
  }
}

template <>
void run_cpu<Adam>(Table& t, const Adam::Options& options, int64_t step, double scale, double limit) {
  const bool is_cut = std::isfinite(limit);
  const auto rule = zx::SparseAdam::of(options.lr, options.beta1, options.beta2, options.eps, step);
  const float sign = options.maximize != 0.0 ? -1.0F : 1.0F;
  for (size_t i = 0; i < t.rows.size(); ++i) {
    for (int64_t k = 0; k < t.width; ++k) {
      const float grad = t.row(t.grads, static_cast<int64_t>(i))[k];
      float& mean = t.row(t.states[0], t.places[i])[k];
      float& square = t.row(t.states[1], t.places[i])[k];
      float& value = t.row(t.values, t.rows[i])[k];
      rule.advance(sign * (is_cut ? limited(grad, scale, limit) : grad * static_cast<float>(scale)), mean, square);
      value = rule.moved(value, mean, std::sqrt(square));
    }
  }
}

// Any NaN for a NaN.
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return (std::isnan(x) && std::isnan(y)) || std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
  });
}

template <class Rule>
void check_rule(int most_states) {
  for (const int64_t width : {1, 3, 4, 12, 64, 130}) {
    for (const int64_t shift : {0, 1}) {
      for (const double limit : {kNoLimit, 0.25}) {
        for (int states = Rule::kLeastStates; states <= most_states; ++states) {
          for (const auto& options : options_tried<Rule>(states)) {
            const Table before(37, width, shift);
            Table on_cpu = before;
            run_cpu<Rule>(on_cpu, options, 3, 0.5, limit);
            in_every_order([&] {
              Table on_cuda = before;
              run_cuda<Rule>(on_cuda, options, 3, 0.5, limit);
              CHECK(same_bits(on_cuda.values, on_cpu.values));
              for (size_t s = 0; s < on_cuda.states.size(); ++s) CHECK(same_bits(on_cuda.states[s], on_cpu.states[s]));
            });
          }
        }
      }
    }
  }
}

}  // namespace

TEST(rows_have_the_bits_of_the_cpu) {
  check_rule<Adam>(2);
  check_rule<zx::Sgd>(1);
  check_rule<zx::Lion>(1);
}

TEST(no_rows_are_no_work) {
  Table table(37, 4, 0);
  const std::vector<float> before = table.values;
  table.rows.clear();
  run_cuda<Adam>(table, options_tried<Adam>(2).front(), 1, 1.0, kNoLimit);
  CHECK(same_bits(table.values, before));
}
