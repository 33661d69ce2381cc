// The kernels are templates over a rule: one that is not Adam, with one state or none, through the CPU's and the CUDA
// ones. A rule that is shipped is tested by its numbers; this holds what Adam can't show.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "check.h"
// clang-format off: in the order of csrc/cpu/kernels_scalar.cpp
#include "cpu/kernels.h"
#include "math/dynamic_map.h"
#include "math/random.h"
#include "math/scalar_lane.h"

#define ZX_LAMBDA __attribute__((always_inline))
namespace zx {
namespace {
#include "cpu/simd.h"
#include "cpu/simd_state.h"
#include "cpu/state.h"
#include "cpu/update_kernel.h"
}  // namespace
}  // namespace zx
// clang-format on
#include "cuda/update.cuh"

namespace {

[[maybe_unused]] constexpr auto kOfShippedRules = &zx::update;  // defined by what is included, and not wanted here

using zx::DType;
using zx::Master;
using zx::StateKind;

// state = momentum * state + grad; param -= lr * state. Without momentum there is no state.
struct Momentum {
  static constexpr const char* kName = "momentum";
  static constexpr zx::StateTraits kStates[] = {{.has_negatives = true, .takes_upper_bits = true}};
  static constexpr int kLeastStates = 0;
  struct Options {
    double lr;
    double momentum;
  };
  static int num_states(const Options& options) { return options.momentum != 0.0 ? 1 : 0; }
  template <class T>
  struct Step {
    T neg_lr;
    T momentum;
  };
  static Step<double> fold(const Options& options, int64_t /*step*/, double /*grad_scale*/) {
    return {-options.lr, options.momentum};
  }
  template <class T>
  static Step<T> narrow(const Step<double>& s) {
    return {static_cast<T>(s.neg_lr), static_cast<T>(s.momentum)};
  }
  static constexpr bool kHasUncheckedStep = false;

  template <class V, int N>
  static ZX_HD void update(const Step<typename V::Scalar>& s, V grad, zx::Lanes<V, N>& at) {
    if constexpr (N > 0) grad = at.state[0] = fma(V::splat(s.momentum), at.state[0], grad);
    at.param = fma(V::splat(s.neg_lr), grad, at.param);
  }
};

constexpr int64_t kNumel = 700;  // two blocks and a part of one
constexpr int64_t kParamStart = 512;
const zx::RandomKey kKey = zx::random_key(3, 7);

// What one call reads and writes: fp32 parameters, and a state of any kind.
struct Buffers {
  explicit Buffers(StateKind kind) : states{kind, {}} {
    for (int64_t i = 0; i < kNumel; ++i) {
      param.push_back(static_cast<float>(i % 31) - 15.0F);
      grad.push_back(static_cast<float>(i % 17) / 8.0F - 1.0F);
      wide.push_back(static_cast<float>(i % 13) / 4.0F - 1.5F);
      halves.push_back(zx::float_to_bf16(wide.back()));
      codes.push_back(static_cast<uint8_t>(i % 256));
    }
  }
  // Where this copy's state lies.
  const zx::StoredStates& stored() {
    void* const values[] = {wide.data(), halves.data(), codes.data()};
    const bool coded = states.kind == StateKind::blockwise;
    states.at[0] = {values[static_cast<size_t>(states.kind)], coded ? scales.data() : nullptr};
    return states;
  }
  float state(int64_t i) const {
    const auto at = static_cast<size_t>(i);
    if (states.kind == StateKind::wide) return wide[at];
    if (states.kind == StateKind::bf16) return zx::bf16_to_float(halves[at]);
    return zx::decode(zx::kSignedMap.values, codes[at], scales[at / zx::kStateBlock]);
  }

  std::vector<float> param;
  std::vector<float> grad;
  std::vector<float> wide;
  std::vector<zx::bf16> halves;
  std::vector<uint8_t> codes;
  std::vector<float> scales{1.0F, 2.0F, 0.5F};
  zx::StoredStates states;
};

void run_cpu(Buffers& on, const Momentum::Options& options) {
  const auto step = Momentum::fold(options, 3, 1.0);
  zx::update_param<Momentum>({zx::RuleKind{}, DType::f32, Master::none, DType::f32, on.param.data(), nullptr,
                              on.grad.data(), Momentum::num_states(options), on.stored(), kNumel, kParamStart, kKey},
                             step);
}

template <class Stored>
void run_cuda(Buffers& on, const Momentum::Options& options) {
  using namespace zx::cuda;
  const zx::Segment segment{0, kNumel, 0, 7, kParamStart};
  Folded<Momentum, float> folded{Momentum::narrow<float>(Momentum::fold(options, 3, 1.0)), kKey, true,
                                 zx::first_states<Momentum>(Momentum::num_states(options)), kParamStart};
  const UpdateShard shard{{zx::RuleKind{}, DType::f32, Master::none, DType::f32, on.param.data(), nullptr,
                           on.grad.data(), on.stored(), kNumel},
                          {&segment, 1, nullptr, nullptr, nullptr, nullptr, &folded}};
  CHECK_EQ((launch_update<Momentum, PlainParam<float>, Stored, float>({&shard, 1}, {nullptr, 0})), 0);
}

void check_rule(StateKind kind, double momentum, void (*run)(Buffers&, const Momentum::Options&)) {
  const Buffers before(kind);
  Buffers after = before;
  run(after, {0.25, momentum});
  for (int64_t i = 0; i < kNumel; ++i) {
    const auto at = static_cast<size_t>(i);
    const float old = before.state(i);
    const float state =
        momentum == 0.0 ? before.grad[at] : std::fma(static_cast<float>(momentum), old, before.grad[at]);
    CHECK_EQ(after.param[at], std::fma(-0.25F, state, before.param[at]));
    if (momentum == 0.0) {
      CHECK_EQ(after.state(i), old);
    } else if (kind == StateKind::wide) {
      CHECK_EQ(after.wide[at], state);
    } else if (kind == StateKind::bf16) {
      const uint32_t bits = zx::random_bits(kKey, kParamStart + i) >> 16;
      CHECK_EQ(after.halves[at].bits, zx::float_to_bf16_stochastic(state, bits).bits);
    } else {  // the signed map, or a negative state would be lost
      CHECK(std::fabs(after.state(i) - state) <= 0.05F * std::fabs(after.scales[at / zx::kStateBlock]));
    }
  }
}

}  // namespace

TEST(a_rule_with_one_state_is_updated_as_it_says) {
  check_rule(StateKind::wide, 0.9, run_cpu);
  check_rule(StateKind::bf16, 0.9, run_cpu);
  check_rule(StateKind::blockwise, 0.9, run_cpu);
  check_rule(StateKind::wide, 0.9, run_cuda<float>);
  check_rule(StateKind::bf16, 0.9, run_cuda<zx::bf16>);
}

TEST(a_rule_without_a_state_touches_none) {
  check_rule(StateKind::wide, 0.0, run_cpu);
  check_rule(StateKind::wide, 0.0, run_cuda<float>);
}
