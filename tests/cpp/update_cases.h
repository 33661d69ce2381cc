// Every combination of dtypes and master that the update knows, and some options.
#pragma once

#include "elements.h"

namespace zx::testing {

struct UpdateCase {
  DType param;
  Master master;
  DType grad;
  bool amsgrad;
  StateKind state = StateKind::wide;
};

inline std::vector<UpdateCase> update_cases(StateKind state) {
  std::vector<UpdateCase> cases;
  for (const bool amsgrad : {false, true}) {
    for (const DType grad : kDTypes) {
      if (state == StateKind::wide) cases.push_back({DType::f64, Master::none, grad, amsgrad, state});
      if (grad == DType::f64) continue;
      cases.push_back({DType::f32, Master::none, grad, amsgrad, state});
      for (const DType half : {DType::bf16, DType::f16}) {
        cases.push_back({half, Master::none, grad, amsgrad, state});
        cases.push_back({half, Master::fp32, grad, amsgrad, state});
      }
      cases.push_back({DType::bf16, Master::remainder, grad, amsgrad, state});
    }
  }
  return cases;
}

inline std::string name_of(const UpdateCase& c) {
  constexpr std::array masters{"none", "remainder", "fp32"};
  constexpr std::array states{"", "bf16 moments", "8-bit moments"};
  return joined({name_of(c.param), masters[static_cast<size_t>(c.master)], name_of(c.grad), c.amsgrad ? "amsgrad" : "",
                 states[static_cast<size_t>(c.state)]});
}

inline DType state_dtype(const UpdateCase& c) {
  if (c.state != StateKind::wide) return c.state == StateKind::bf16 ? DType::bf16 : kU8;
  return c.param == DType::f64 ? DType::f64 : DType::f32;
}
inline DType master_dtype(const UpdateCase& c) { return c.master == Master::remainder ? DType::bf16 : DType::f32; }

// Random parameters and masters. The master of every third element does not round to it, as if somebody had written
// into the parameter; all others do.
inline void make_masters(const UpdateCase& c, int64_t numel, Elements& param, const Elements& master) {
  for (int64_t i = 0; c.master == Master::fp32 && i < numel; ++i) {
    if (i % 3 == 0) continue;
    const float exact = std::bit_cast<float>(static_cast<uint32_t>(master.get(i)));
    param.set(i, c.param == DType::bf16 ? float_to_bf16(exact).bits : float_to_f16(exact).bits);
  }
}

// One moment of `numel` elements: random numbers or codes, and scales for these.
struct StoredMoment {
  StoredMoment(const UpdateCase& c, int64_t numel, int64_t offset, bool finite = false)
      : values(made(state_dtype(c), numel, offset, finite)),
        scales(made(DType::f32, c.state == StateKind::blockwise ? numel / kStateBlock + 1 : 0, offset, finite)) {}

  static Elements made(DType dtype, int64_t numel, int64_t offset, bool finite) {
    return finite ? Elements::finite(dtype, numel, offset) : Elements::random(dtype, numel, offset);
  }
  StoredState at(int64_t element) {
    const bool coded = values.dtype() == kU8;
    return {values.at(element), coded ? reinterpret_cast<float*>(scales.at(element / kStateBlock)) : nullptr};
  }
  void check_same(const StoredMoment& expected, const std::string& name) const {
    CHECK_FOR(name, values.differences(expected.values) == 0);
    CHECK_FOR(name, values.canaries_live());
    CHECK_FOR(name, scales.same_bytes(expected.scales));
  }

  Elements values;
  Elements scales;
};

// All moments of a shard or span, from an element on.
struct StoredMoments {
  StoredMoments(const UpdateCase& c, int64_t numel, int64_t offset, bool finite = false)
      : kind(c.state),
        amsgrad(c.amsgrad),
        exp_avg(c, numel, offset + 1, finite),
        exp_avg_sq(c, numel, offset, finite),
        max_exp_avg_sq(c, numel, offset + 3, finite) {}

  int num_states() const { return amsgrad ? 3 : 2; }
  StoredStates at(int64_t element) {
    return {kind, {exp_avg.at(element), exp_avg_sq.at(element), amsgrad ? max_exp_avg_sq.at(element) : StoredState{}}};
  }
  void check_same(const StoredMoments& expected, const std::string& name) const {
    exp_avg.check_same(expected.exp_avg, joined({name, "exp_avg"}));
    exp_avg_sq.check_same(expected.exp_avg_sq, joined({name, "exp_avg_sq"}));
    max_exp_avg_sq.check_same(expected.max_exp_avg_sq, joined({name, "max_exp_avg_sq"}));
  }

  StateKind kind;
  bool amsgrad;
  StoredMoment exp_avg;
  StoredMoment exp_avg_sq;
  StoredMoment max_exp_avg_sq;
};

inline constexpr std::array kStateKinds{StateKind::wide, StateKind::bf16, StateKind::blockwise};

}  // namespace zx::testing
