// Every combination of rule, dtypes and master that the update knows.
#pragma once

#include "elements.h"
#include "rule_cases.h"

namespace zx::testing {

struct UpdateCase {
  DType param;
  Master master;
  DType grad;
  Variant of;
  StateKind state = StateKind::wide;
};

// Where there are no states, there are none that are stored in another way.
inline std::vector<UpdateCase> update_cases(StateKind state) {
  std::vector<UpdateCase> cases;
  for (const Variant of : variants()) {
    if (of.num_states == 0 && state != StateKind::wide) continue;
    for (const DType grad : kDTypes) {
      if (state == StateKind::wide) cases.push_back({DType::f64, Master::none, grad, of, state});
      if (grad == DType::f64) continue;
      cases.push_back({DType::f32, Master::none, grad, of, state});
      for (const DType half : {DType::bf16, DType::f16}) {
        cases.push_back({half, Master::none, grad, of, state});
        cases.push_back({half, Master::fp32, grad, of, state});
      }
      cases.push_back({DType::bf16, Master::remainder, grad, of, state});
    }
  }
  return cases;
}

inline std::string name_of(const UpdateCase& c) {
  constexpr std::array masters{"none", "remainder", "fp32"};
  constexpr std::array states{"", "in bf16", "in 8 bits"};
  return joined({name_of(c.of.rule), name_of(c.param), masters[static_cast<size_t>(c.master)], name_of(c.grad),
                 std::to_string(c.of.num_states) + " states", states[static_cast<size_t>(c.state)]});
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

// One state of `numel` elements: random numbers or codes, and scales for these.
struct StateElements {
  StateElements(const UpdateCase& c, int64_t numel, int64_t offset, bool finite)
      : values(made(state_dtype(c), numel, offset, finite)),
        scales(made(DType::f32, c.state == StateKind::blockwise ? numel / kStateBlock + 1 : 0, offset, finite)) {}

  static Elements made(DType dtype, int64_t numel, int64_t offset, bool finite) {
    return finite ? Elements::finite(dtype, numel, offset) : Elements::random(dtype, numel, offset);
  }
  StoredState at(int64_t element) {
    const bool coded = values.dtype() == kU8;
    return {values.at(element), coded ? reinterpret_cast<float*>(scales.at(element / kStateBlock)) : nullptr};
  }
  void check_same(const StateElements& expected, const std::string& name) const {
    CHECK_FOR(name, values.differences(expected.values) == 0);
    CHECK_FOR(name, values.canaries_live());
    CHECK_FOR(name, scales.same_bytes(expected.scales));
  }

  Elements values;
  Elements scales;
};

// All states of a shard or span. There is one more than the rule keeps, which no kernel is told of.
struct AllStates {
  AllStates(const UpdateCase& c, int64_t numel, int64_t offset, bool finite = false)
      : kind(c.state), num_states(c.of.num_states) {
    for (int s = 0; s <= num_states; ++s) each.emplace_back(c, numel, offset + s % 3, finite);
  }

  // From an element on.
  StoredStates at(int64_t element) {
    StoredStates found{kind, {}};
    for (int s = 0; s < num_states; ++s) found.at[s] = each[static_cast<size_t>(s)].at(element);
    return found;
  }
  void clear_masked(KeptBits kept) {
    for (int s = 0; s < num_states; ++s) each[static_cast<size_t>(s)].values.clear_masked(kept);
  }
  void check_same(const AllStates& expected, const std::string& name) const {
    for (size_t s = 0; s < each.size(); ++s) {
      each[s].check_same(expected.each[s], joined({name, "state", std::to_string(s)}));
    }
  }

  StateKind kind;
  int num_states;
  std::vector<StateElements> each{};
};

inline constexpr std::array kStateKinds{StateKind::wide, StateKind::bf16, StateKind::blockwise};

}  // namespace zx::testing
