// The interface between rules and kernels. An update rule is a struct of constants and static functions (math/adam.h is
// one), and every update kernel is a template over it. A rule has:
//
//   kName, kLeastStates, kStates       its name, and the states that it may keep for each element
//   Options                            a row of the options table: doubles only, in the order of the rule's columns in
//                                      zerox/rules
//   num_states(options)                how many of kStates it keeps under these options: always the first ones
//   counts_step(options)               whether an update under these options is one of the steps that are counted
//   Step<T>, fold(), narrow()          the constants of one parameter and step: computed in double, then narrowed to T
//   update(step, grad, lanes)          the rule itself, for V::kLanes elements
//   kHasUncheckedStep                  whether its last step takes a root and divides. If so, it also has the functions
//                                      that Note [Roots and quotients without a check each] needs
//
// V is a vector, or a scalar lane, of floats or doubles: it has the operators + - * /, the functions fma, sqrt, max and
// sign, and V::splat().
#pragma once

#include <cstddef>

#include "math/macros.h"

namespace zx {

// One of the states of a rule.
struct StateTraits {
  bool has_negatives;     // decides which map it has in 8 bits
  bool takes_upper_bits;  // in bf16: the upper half of its random bits rounds it, not the lower; see random_bits()
};

template <class Rule>
constexpr int kMostStatesOf = static_cast<int>(sizeof(Rule::kStates) / sizeof(StateTraits));

// The length of an array for N states: C++ has no arrays of length 0.
template <int N>
constexpr int kRoomFor = N > 0 ? N : 1;

// V::kLanes elements: their parameters, and the N states that are kept for each.
template <class V, int N>
struct Lanes {
  V param;
  V state[kRoomFor<N>];
};

// A number as a type, for lambdas that need it at compile time.
template <int kNumber>
struct Constant {
  static constexpr int value = kNumber;
};
template <class T>
struct Type {
  using type = T;
};

// Calls body(Constant<0>{}), ... body(Constant<N - 1>{}).
ZX_FOR_ANY_BODY
template <int N, int kFirst = 0, class Body>
ZX_HD void for_each_state(const Body& body) {
  if constexpr (kFirst < N) {
    body(Constant<kFirst>{});
    for_each_state<N, kFirst + 1>(body);
  }
}

// The states that a rule keeps, always the first ones of kStates. They are kept as bools, since the CUDA kernels would
// compare a number anew at every element.
template <class Rule>
struct FirstStates {
  bool at[kMostStatesOf<Rule>];
};
template <class Rule>
ZX_HD FirstStates<Rule> first_states(int num_states) {
  FirstStates<Rule> states;
  for (int s = 0; s < kMostStatesOf<Rule>; ++s) states.at[s] = s < num_states;
  return states;
}

// Calls body(Constant<N>{}), where N states are kept. There are kernels for every N that the rule allows.
ZX_FOR_ANY_BODY
template <class Rule, int N = kMostStatesOf<Rule>, class Body>
ZX_HD void with_num_states(const FirstStates<Rule>& states, const Body& body) {
  if constexpr (N > Rule::kLeastStates) {
    if (states.at[N - 1]) {
      body(Constant<N>{});
    } else {
      with_num_states<Rule, N - 1>(states, body);
    }
  } else {
    body(Constant<N>{});
  }
}

}  // namespace zx
