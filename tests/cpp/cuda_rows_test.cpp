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
#include "math/scalar_lane.h"
#include "math/sparse_adam.h"
#include "rule_cases.h"

namespace {

using namespace zx::testing;
using zx::Adam;

constexpr double kNoLimit = HUGE_VAL;

struct Kind {
  zx::DType dtype;
  zx::Master master;
};
constexpr Kind kKinds[] = {{zx::DType::f32, zx::Master::none},       {zx::DType::bf16, zx::Master::none},
                           {zx::DType::bf16, zx::Master::remainder}, {zx::DType::bf16, zx::Master::fp32},
                           {zx::DType::f16, zx::Master::none},       {zx::DType::f16, zx::Master::fp32}};

// A table of which some rows are touched, in any order; masters and states are in another order.
struct Table {
  Table(int64_t num_rows, int64_t width, int64_t shift, Kind kind) : width(width), shift(shift), kind(kind) {
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
    fill(master, static_cast<size_t>(num_rows));
    fill(values, static_cast<size_t>(num_rows));
    for (auto& state : states) {
      fill(state, static_cast<size_t>(num_rows));
      for (float& each : state) each = std::fabs(each);
    }
    grads[static_cast<size_t>(shift)] = std::numeric_limits<float>::quiet_NaN();
    grads.back() = std::numeric_limits<float>::infinity();
    if (kind.dtype == zx::DType::f32) return;
    for (int64_t number = 0; number < num_rows; ++number) {
      for (int64_t k = 0; k < width; ++k) store({normal(random)}, number, k);
    }
    // Most masters round to their rows; the others were written since.
    for (size_t i = 0; i < (kind.master == zx::Master::fp32 ? rows.size() : 0); ++i) {
      for (int64_t k = 0; k < (i % 5 == 0 ? 0 : width); ++k) store({row(master, places[i])[k]}, rows[i], k);
    }
  }

  using Lane = zx::ScalarLane<float>;
  float* row(std::vector<float>& of, int64_t number) const { return of.data() + shift + number * width; }
  void store(Lane exact, int64_t number, int64_t column) {
    char* const to = value(number, column);
    kind.dtype == zx::DType::bf16 ? exact.store(reinterpret_cast<zx::bf16*>(to))
                                  : exact.store(reinterpret_cast<zx::f16*>(to));
  }
  // Values and masters of 16 bits lie in the first half of their arrays.
  char* value(int64_t number, int64_t column = 0) { return element(values, number, column, zx::width_of(kind.dtype)); }
  char* master_at(int64_t number, int64_t column = 0) {
    if (kind.master == zx::Master::none) return nullptr;
    return element(master, number, column, kind.master == zx::Master::fp32 ? 4 : 2);
  }
  char* element(std::vector<float>& of, int64_t number, int64_t column, int64_t bytes) const {
    return reinterpret_cast<char*>(of.data()) + (shift + number * width + column) * bytes;
  }

  int64_t width;
  int64_t shift;  // of all arrays from a multiple of 16 bytes
  Kind kind;
  std::vector<int64_t> rows;
  std::vector<int64_t> places;
  std::vector<float> grads;
  std::vector<float> values;
  std::vector<float> master;
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
  zx::TouchedRows touched{static_cast<int64_t>(t.rows.size()),
                          t.width,
                          t.rows.data(),
                          t.places.data(),
                          t.row(t.grads, 0),
                          t.kind.dtype,
                          t.value(0),
                          t.kind.master,
                          t.master_at(0)};
  for (int s = 0; s < Rule::num_states(options); ++s) touched.states[s] = t.row(t.states[s], 0);
  const zx::cuda::RowUpdate update{kind_of<Rule>(), &options.lr, step, scale, limit, touched};
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
    const float* given = t.row(t.grads, static_cast<int64_t>(i));
    std::vector<float> grad(given, given + t.width);
    for (float& each : grad) each = is_cut ? limited(each, scale, limit) : each;
    zx::UpdateSpan span{};
    span.rule = kind_of<Rule>();
    span.param_dtype = t.kind.dtype;
    span.master_kind = t.kind.master;
    span.grad_dtype = zx::DType::f32;
    span.param = t.value(t.rows[i]);
    span.master = t.master_at(t.places[i]);
    span.grad = grad.data();
    span.num_states = Rule::num_states(options);
    for (int s = 0; s < span.num_states; ++s) span.states.at[s].values = t.row(t.states[s], t.places[i]);
    span.numel = t.width;
    zx::kernels_scalar().update(span, &folded);
  }
}

template <class Half>
void move_half(const zx::SparseAdam& rule, Half* value, char* master, zx::Master kind, float mean, float root) {
  using Lane = Table::Lane;
  auto* const wide = reinterpret_cast<float*>(master);
  const Lane before = kind == zx::Master::fp32 ? Lane::load_master(value, wide) : Lane::load(value);
  if constexpr (std::is_same_v<Half, zx::bf16>) {
    if (kind == zx::Master::remainder) {
      auto* const remainder = reinterpret_cast<int16_t*>(master);
      const Lane exact = Lane::load_split(value, remainder);
      return Lane{rule.moved(exact.x, mean, root)}.store_split(value, remainder);
    }
  }
  const Lane after{rule.moved(before.x, mean, root)};
  if (kind == zx::Master::fp32) *wide = after.x;
  after.store(value);
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
      rule.advance(sign * (is_cut ? limited(grad, scale, limit) : grad * static_cast<float>(scale)), mean, square);
      const float root = std::sqrt(square);
      char* const value = t.value(t.rows[i], k);
      char* const master = t.master_at(t.places[i], k);
      if (t.kind.dtype == zx::DType::f32) {
        auto& wide = *reinterpret_cast<float*>(value);
        wide = rule.moved(wide, mean, root);
      } else if (t.kind.dtype == zx::DType::bf16) {
        move_half(rule, reinterpret_cast<zx::bf16*>(value), master, t.kind.master, mean, root);
      } else {
        move_half(rule, reinterpret_cast<zx::f16*>(value), master, t.kind.master, mean, root);
      }
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
void check_rule(Kind kind, int64_t width, int64_t shift, double limit, const typename Rule::Options& options) {
  const Table before(37, width, shift, kind);
  Table on_cpu = before;
  run_cpu<Rule>(on_cpu, options, 3, 0.5, limit);
  in_every_order([&] {
    Table on_cuda = before;
    run_cuda<Rule>(on_cuda, options, 3, 0.5, limit);
    CHECK(same_bits(on_cuda.values, on_cpu.values));
    CHECK(same_bits(on_cuda.master, on_cpu.master));
    for (size_t s = 0; s < on_cuda.states.size(); ++s) CHECK(same_bits(on_cuda.states[s], on_cpu.states[s]));
  });
}

template <class Rule>
void check_rules(int most_states) {
  for (const Kind kind : kKinds) {
    for (const int64_t width : {1, 3, 4, 64, 130}) {
      for (const int64_t shift : {0, 1}) {
        for (int states = Rule::kLeastStates; states <= most_states; ++states) {
          for (const auto& options : options_tried<Rule>(states)) {
            for (const double limit : {kNoLimit, 0.25}) check_rule<Rule>(kind, width, shift, limit, options);
          }
        }
      }
    }
  }
}

}  // namespace

TEST(rows_have_the_bits_of_the_cpu) {
  check_rules<Adam>(2);
  check_rules<zx::Sgd>(1);
  check_rules<zx::Lion>(1);
}

TEST(no_rows_are_no_work) {
  Table table(37, 4, 0, kKinds[0]);
  const std::vector<float> before = table.values;
  table.rows.clear();
  run_cuda<Adam>(table, options_tried<Adam>(2).front(), 1, 1.0, kNoLimit);
  CHECK(same_bits(table.values, before));
}
