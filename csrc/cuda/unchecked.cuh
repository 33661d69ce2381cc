// The update's root and quotients of floats, rounded as IEEE says, where their operands are known to be ordinary.
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
// nvcc makes of sqrt and / a chain of fused operations on the device's approximation of 1/sqrt(x) or 1/x, which rounds
// correctly for ordinary operands, a check whether they are, and a call for all others. In the update that is three
// checks an element, each with a branch that instructions don't move across: 72 of them an element where 50 do. Here
// are the same chains alone. Whether all of a thread's operands are ordinary is asked once, and where one is not, sqrt
// and / compute all of them again. So bits are those of IEEE arithmetic either way.

// x in [2^-100, 2^127).
__device__ __forceinline__ float unchecked_sqrt(float x) {
  const float inverse = approximate_rsqrt(x);
  const float root = x * inverse;
  return std::fma(std::fma(-root, root, x), inverse * 0.5f, root);
}
// Neither the quotient nor what rounding leaves of `a` may be subnormal. `inverse`: 1 / b, rounded correctly.
__device__ __forceinline__ float unchecked_quotient(float a, float b, float inverse) {
  const float quotient = a * inverse;
  return std::fma(std::fma(-b, quotient, a), inverse, quotient);
}
__device__ __forceinline__ float unchecked_quotient(float a, float b) {
  const float inverse = approximate_reciprocal(b);
  return unchecked_quotient(a, b, std::fma(std::fma(-b, inverse, 1.0f), inverse, inverse));
}

// What is ordinary. With the bounds on constants (is_ordinary in fold.cu) the root lies in [2^-50, 2^20], the
// denominator in [2^-50, 2^41], and the last quotient in [2^-125, 2^110].
constexpr float kLeastSecond = 0x1p-100f;
constexpr float kMostSecond = 0x1p+40f;
constexpr float kLeastNumerator = 0x1p-84f;
constexpr float kMostNumerator = 0x1p+60f;

// In one subtraction and one comparison, for x of either sign where a bit is shifted out.
template <int kShift>
__device__ __forceinline__ bool lies_between(float least, float x, float most) {
  const uint32_t low = std::bit_cast<uint32_t>(least) << kShift;
  const uint32_t high = std::bit_cast<uint32_t>(most) << kShift;
  return (std::bit_cast<uint32_t>(x) << kShift) - low <= high - low;
}

// adam_update() for N elements.
template <bool kAmsgrad, int N, class T, class Grad>
__device__ __forceinline__ void update_each(const Folded<T>& folded, const Pack<Grad, N>& grad,
                                            AdamLanes<ScalarLane<T>> (&at)[N]) {
  if constexpr (std::is_same_v<T, double>) {
    ZX_UNROLL
    for (int j = 0; j < N; ++j) adam_update<kAmsgrad>(folded.step, ScalarLane<T>::load(&grad.at[j]), at[j]);
  } else {
    const AdamStep<float>& s = folded.step;
    bool ordinary = folded.ordinary;
    float updated[N];
    ZX_UNROLL
    for (int j = 0; j < N; ++j) {
      adam_moments<kAmsgrad>(s, ScalarLane<float>::load(&grad.at[j]), at[j]);
      const float second = adam_second<kAmsgrad>(at[j]).x;
      const float numerator = s.neg_step_size * at[j].exp_avg.x;
      ordinary = ordinary && lies_between<0>(kLeastSecond, second, kMostSecond) &&
                 lies_between<1>(kLeastNumerator, numerator, kMostNumerator);
      const float root =
          unchecked_quotient(unchecked_sqrt(second), s.bias_correction2_sqrt, folded.inverse_bias_correction2_sqrt);
      updated[j] = at[j].param.x + unchecked_quotient(numerator, root + s.eps);
    }
    if (ordinary) {
      ZX_UNROLL
      for (int j = 0; j < N; ++j) at[j].param.x = updated[j];
    } else {
      ZX_UNROLL
      for (int j = 0; j < N; ++j) at[j].param = adam_param<kAmsgrad>(s, at[j]);
    }
  }
}

}  // namespace zx::cuda
