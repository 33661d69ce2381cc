// Conversions between fp32 and the 16-bit formats, on bit patterns, the same on every device.
#pragma once

#include <bit>
#include <cstdint>

#include "math/macros.h"

namespace zx {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

ZX_HD bool is_nan_bits(uint32_t bits) {
  const float x = std::bit_cast<float>(bits);
  return x != x;
}

ZX_HD float bf16_to_float(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Rounds to the nearest, ties to even. NaN stays NaN (made quiet).
ZX_HD bf16 float_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (is_nan_bits(bits)) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Rounds to the neighbour below or above at random. The nearer neighbour is chosen more often, in proportion, so that
// the mean over all 2^16 values of the lower half of `random` is x itself. Values that bf16 can hold stay as they are,
// NaN stays NaN (made quiet), and finite values stay finite: above the largest bf16 there is nothing to round up to, so
// such a value is rounded down.
ZX_HD bf16 float_to_bf16_stochastic(float x, uint32_t random) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t rounded = magnitude + (random & 0xffffu);
  if (rounded > 0x7f7fffffu) rounded = 0x7f7fffffu;
  if (magnitude >= 0x7f800000u) rounded = magnitude | (magnitude > 0x7f800000u ? 0x400000u : 0u);
  return {static_cast<uint16_t>(((bits & 0x80000000u) | rounded) >> 16)};
}

ZX_HD float f16_to_float(f16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  // The exponents' biases differ by 112. The product of a subnormal number is also exact.
  uint32_t widened = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
  if (magnitude >= 0x7c00u) widened = 0x7f800000u | magnitude << 13;  // infinity or NaN
  if (magnitude > 0x7c00u) widened |= 0x400000u;                      // made quiet
  return std::bit_cast<float>(sign | widened);
}
// The same conversion for an operand of arithmetic. On a GPU, arithmetic keeps nothing of a NaN but the fact that it is
// one, so the device's own conversion, which keeps no more, is good enough.
ZX_HD float f16_operand(f16 x) {
#if defined(__CUDA_ARCH__)
  float converted;
  asm("cvt.f32.f16 %0, %1;" : "=f"(converted) : "h"(x.bits));
  return converted;
#else
  return f16_to_float(x);
#endif
}

// Rounds to the nearest, ties to even. NaN stays NaN (made quiet), as in the F16C conversions.
ZX_HD f16 float_to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (x != x) return {static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
#if defined(__CUDA_ARCH__)
  f16 converted;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(converted.bits) : "f"(x));
  return converted;
#else
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds past 65504
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 aligns 2^-24 with the last bit, rounding once
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
#endif
}

// Note [A master as bf16 parameter plus remainder]
// The fp32 master is kept as the bf16 parameter (its upper half, rounded half away from zero) and the 16 bits that
// rounding lost, as a signed number. A negative remainder means that the parameter was rounded up. Rounding ties to
// even can't be used: two masters would share one pair. NaN must be caught: 0x7FFFFFFF would round to -0.0. A user may
// write the parameter and leave the remainder. The two still join to a master that rounds to the written value, except
// for pairs that no master has: zero with a negative remainder, and infinity with a positive one. Their joined bits
// would be NaN, so the parameter alone is taken.
struct SplitMaster {
  bf16 param;
  int16_t remainder;
};

ZX_HD SplitMaster split_master(float master) {
  uint32_t bits = std::bit_cast<uint32_t>(master);
  if (is_nan_bits(bits)) bits = (bits & 0x80000000u) | 0x7fc00000u;
  return {{static_cast<uint16_t>((bits + 0x8000u) >> 16)}, static_cast<int16_t>(bits & 0xffffu)};
}

ZX_HD float join_master(bf16 param, int16_t remainder) {
  const uint32_t joined = (static_cast<uint32_t>(param.bits) << 16) + static_cast<uint32_t>(int32_t{remainder});
  return is_nan_bits(joined) ? bf16_to_float(param) : std::bit_cast<float>(joined);
}

}  // namespace zx
