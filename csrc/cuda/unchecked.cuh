// Roots and quotients of floats, rounded as IEEE says, for operands that are known to be ordinary.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "cuda/device.cuh"
#include "cuda/fold.cuh"
#include "cuda/pack.cuh"
#include "math/scalar_lane.h"

namespace zx::cuda {

// Note [Roots and quotients without a check each]
// nvcc compiles sqrt and / to a chain of fused operations on the device's approximation of 1/sqrt(x) or 1/x, which
// rounds correctly for ordinary operands; a check whether the operands are ordinary; and a call for all others. In
// Adam's update that is three checks per element, each with a branch that instructions don't move across: 72
// instructions per element where 50 do. The functions here are the same chains alone. All operands of a thread are
// checked together, once, and if one is not ordinary, sqrt and / compute all of them again. So bits are those of IEEE
// arithmetic either way. Only elements at rest, whose moments are zero, are told apart before that: masked ones, and
// rows of an embedding that no batch has shown yet, are many, and lie between ordinary ones.

// x must be in [2^-100, 2^127).
__device__ __forceinline__ float unchecked_sqrt(float x) {
  const float inverse = approximate_rsqrt(x);
  const float root = x * inverse;
  return std::fma(std::fma(-root, root, x), inverse * 0.5f, root);
}
// Neither the quotient nor what rounding leaves of `a` may be subnormal. `inverse` is 1 / b, rounded correctly.
__device__ __forceinline__ float unchecked_quotient(float a, float b, float inverse) {
  const float quotient = a * inverse;
  return std::fma(std::fma(-b, quotient, a), inverse, quotient);
}
__device__ __forceinline__ float unchecked_quotient(float a, float b) {
  const float inverse = approximate_reciprocal(b);
  return unchecked_quotient(a, b, std::fma(std::fma(-b, inverse, 1.0f), inverse, inverse));
}

// Takes one subtraction and one comparison. With kShift = 1 the sign is shifted out, so x may have either sign.
template <int kShift>
__device__ __forceinline__ bool lies_between(float least, float x, float most) {
  const uint32_t low = std::bit_cast<uint32_t>(least) << kShift;
  const uint32_t high = std::bit_cast<uint32_t>(most) << kShift;
  return (std::bit_cast<uint32_t>(x) << kShift) - low <= high - low;
}

// The functions that a rule's new_param_unchecked() computes with.
struct Unchecked {
  static __device__ __forceinline__ float sqrt(float x) { return unchecked_sqrt(x); }
  static __device__ __forceinline__ float quotient(float a, float b) { return unchecked_quotient(a, b); }
  static __device__ __forceinline__ float quotient(float a, float b, float inverse) {
    return unchecked_quotient(a, b, inverse);
  }
};

// Whether all elements are ordinary or at rest. Sets `updated` of those at rest, after update_states().
template <class Rule, int kStates, int N>
__device__ __forceinline__ bool ordinary_but_for_rest(const typename Rule::template Step<float>& s,
                                                      const Lanes<ScalarLane<float>, kStates> (&lanes)[N],
                                                      float (&updated)[N]) {
  bool found = s.is.ordinary;
  ZX_UNROLL
  for (int j = 0; j < N; ++j) {
    const auto operands = Rule::operands(s, lanes[j]);
    const bool rests = Rule::rests(s, operands);
    if (rests) updated[j] = Rule::new_param_at_rest(lanes[j].param.x, operands);
    found = found && (rests || (lies_between<0>(Rule::kLeastRadicand, operands.radicand, Rule::kMostRadicand) &&
                                lies_between<1>(Rule::kLeastNumerator, operands.numerator, Rule::kMostNumerator)));
  }
  return found;
}

// The rule's update() for N elements.
template <class Rule, int kStates, int N, class T, class Grad>
__device__ __forceinline__ void update_each(const Folded<Rule, T>& folded, const Pack<Grad, N>& grad,
                                            Lanes<ScalarLane<T>, kStates> (&lanes)[N]) {
  const auto& s = folded.step;
  if constexpr (Rule::kHasUncheckedStep && std::is_same_v<T, float>) {
    bool ordinary = s.is.ordinary;
    float updated[N];
    ZX_UNROLL
    for (int j = 0; j < N; ++j) {
      Rule::update_states(s, ScalarLane<float>::load(&grad.at[j]), lanes[j]);
      const auto operands = Rule::operands(s, lanes[j]);
      // This is here, and not in a function of the rule: so nvcc makes a branch of it, and not a number to compute
      // with.
      ordinary = ordinary && lies_between<0>(Rule::kLeastRadicand, operands.radicand, Rule::kMostRadicand) &&
                 lies_between<1>(Rule::kLeastNumerator, operands.numerator, Rule::kMostNumerator);
      updated[j] = Rule::template new_param_unchecked<Unchecked>(s, lanes[j].param.x, operands);
    }
    if (ordinary || ordinary_but_for_rest<Rule>(s, lanes, updated)) {
      ZX_UNROLL
      for (int j = 0; j < N; ++j) lanes[j].param.x = updated[j];
    } else {
      ZX_UNROLL
      for (int j = 0; j < N; ++j) lanes[j].param = Rule::new_param(s, lanes[j]);
    }
  } else {
    ZX_UNROLL
    for (int j = 0; j < N; ++j) Rule::update(s, ScalarLane<T>::load(&grad.at[j]), lanes[j]);
  }
}

}  // namespace zx::cuda
