// Note [8-bit states]
// A state is stored in blocks of 256 elements. Each block has one float, its scale: the value of largest magnitude,
// sign included. So this value is always exact, and a block that is coded twice stays as it is. (If the scale were the
// magnitude alone, a negative value would lose 0.7% at every step, since the map has 1 but not -1.) Every element is a
// code: the number of the map's value that is nearest to element * (1 / scale). If no magnitude in a block reaches the
// least normal float, the block is zero.
//
// The map is the dynamic one of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), section 1.3, as
// bitsandbytes and torchao use it. It has seven decades below 1, and the highest has the most values. Decade d in [0,
// 7) has n = 2^d values (2^(d+1) if the map has no negatives): the middles of n equal parts of [0.1, 1], times
// 10^(d-6). The map also has 0, 1, and if signed the negatives of all values but 1. Codes count the magnitudes up from
// 0, whose code is 0; the code of a negative value is 256 less the code of its magnitude.
//
// Finding the nearest value takes one look-up. The upper 16 bits of a float in [0, 1] leave at most two neighbouring
// values to choose from, and its lower 16 bits tell on which side of the middle between them it lies. (A middle belongs
// to the smaller value.)
//
// Note [The map without tables]
// Look-ups are slow in SIMD, so vectors on the CPU compute values and codes, with the constants of map_arithmetic.h. In
// place of codes they count with numbers: the n values of a decade have the numbers n to 2n - 1, so that a number's
// exponent tells its decade. In the signed map a magnitude's number is its code, in the other one its code + 1. 0 has
// the number before all others, and 1 the one behind them.
//
// To decode: number i of decade d is (18i - 16n + 9) / (20n * 10^(6-d)). Both are exact in float, so one division gives
// the value of the table. 0 is divided by infinity, and for 1 the number is 1/2 less, in the last decade.
//
// To encode a magnitude x: the exponent of x tells its decade d, or the one below, and a comparison with the largest x
// of the lower one decides. Then 4 * (8/9 + 10/9 * x * 10^(6-d)) rises from 4 to 8 while the number rises from n to 2n.
// All floats from 4 to 8 have the exponent bits 129, and shifted to the right by 23 - log2(n) such a float reads 129n +
// (i - n). That is the number i and the 128n that a mask removes. The bits that are shifted out tell how far it is to
// the next number. So near to it that rounding may have led to the wrong side, the vector is in doubt, and its codes
// are looked up.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "math/macros.h"

namespace zx {

constexpr uint32_t kMagnitudeBits = 0x7fffffff;
constexpr uint32_t kOneBits = 0x3f800000;
constexpr uint32_t kLeastBits = 0x34000000;  // 2^-23: in both maps everything below is nearest to 0
constexpr uint32_t kLeastNormalBits = 0x00800000;
constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kNanBits = 0x7fc00000;
constexpr uint32_t kOneSignedCode = 128;

struct DynamicMap {
  float values[256];  // by code
  // Indexed by the upper 16 bits of a magnitude, less those of kLeastBits. An entry plus the magnitude's lower 16 bits
  // has the code in its upper half. So the entry's lower half is 0xffff less the lower 16 bits of the last magnitude
  // that has the smaller code.
  uint32_t nearest[((kOneBits - kLeastBits) >> 16) + 1];
};

// The largest float that is not above the middle between two neighbours.
consteval uint32_t middle_bits(float low, float high) {
  const double middle = (static_cast<double>(low) + static_cast<double>(high)) / 2;  // exact
  const auto rounded = static_cast<float>(middle);
  return std::bit_cast<uint32_t>(rounded) - (static_cast<double>(rounded) > middle ? 1 : 0);
}

// If two middles shared an entry of `nearest`, this would not be a constant expression, and would not compile.
consteval DynamicMap make_dynamic_map(bool has_negatives) {
  std::array<float, 256> magnitudes{};
  int count = 1;  // the first is 0
  double decade = 1e6;
  for (int64_t n = has_negatives ? 1 : 2; n <= (has_negatives ? 64 : 128); n *= 2, decade /= 10) {
    for (int64_t part = 0; part < n; ++part) {  // 0.1 + 0.9 * (part + 0.5) / n, rounded once
      const auto above = static_cast<double>(2 * n + 18 * part + 9);
      magnitudes[count++] = static_cast<float>(above / (20.0 * static_cast<double>(n) * decade));
    }
  }
  magnitudes[count++] = 1.0f;

  DynamicMap map{};
  for (int code = 0; code < count; ++code) map.values[code] = magnitudes[code];
  for (int code = count; code < 256; ++code) map.values[code] = -magnitudes[256 - code];
  uint32_t code = 0;
  uint32_t upper = kLeastBits >> 16;
  for (uint32_t& entry : map.nearest) {
    entry = code << 16;
    if (static_cast<int>(code) + 1 < count) {
      const uint32_t middle = middle_bits(magnitudes[code], magnitudes[code + 1]);
      if (middle >> 16 < upper) throw "two middles share an entry";
      if (middle >> 16 == upper) entry = code++ << 16 | (0xffff - (middle & 0xffff));
    }
    ++upper;
  }
  return map;
}

inline constexpr DynamicMap kSignedMap = make_dynamic_map(true);
inline constexpr DynamicMap kUnsignedMap = make_dynamic_map(false);

// The key of the larger magnitude is larger. Of two equal magnitudes, the positive one has the larger key, and NaN has
// the largest key of all. If values are never negative, and never -0, their bits are the keys.
template <bool kHasNegatives>
ZX_HD uint32_t scale_key(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return kHasNegatives ? (bits << 1 | bits >> 31) ^ 1 : bits;
}

// The scale that belongs to the largest key in a block. It is NaN if an element is NaN or infinite, and then the whole
// block becomes NaN.
template <bool kHasNegatives>
ZX_HD float scale_of_key(uint32_t key) {
  uint32_t bits = kHasNegatives ? (key ^ 1) >> 1 | (key ^ 1) << 31 : key;
  if ((bits & kMagnitudeBits) < kLeastNormalBits) bits = 0;  // its inverse would be infinite
  if ((bits & kMagnitudeBits) >= kInfinityBits) bits = kNanBits;
  return std::bit_cast<float>(bits);
}

// `nearest` is the map's, and `inverse` is 1 / scale. If the map has no negatives, value * inverse must not be
// negative. If the scale is 0 or NaN the product is NaN, and its code is 0. The inverse of a very large scale is
// subnormal, and may be so inexact that the product is above 1.
template <bool kHasNegatives>
ZX_HD uint8_t encode(const uint32_t* nearest, float value, float inverse) {
  const float relative = value * inverse;
  const float magnitude = std::fmin(std::fmax(std::fabs(relative), std::bit_cast<float>(kLeastBits)), 1.0f);
  const uint32_t bits = std::bit_cast<uint32_t>(magnitude);
  uint32_t code = (nearest[(bits - kLeastBits) >> 16] + (bits & 0xffff)) >> 16;
  if (kHasNegatives && std::bit_cast<uint32_t>(relative) >> 31 != 0) {
    code = 256 - (code < kOneSignedCode ? code : kOneSignedCode - 1);
  }
  return static_cast<uint8_t>(code);
}

ZX_HD float decode(const float* values, uint8_t code, float scale) { return values[code] * scale; }

}  // namespace zx
