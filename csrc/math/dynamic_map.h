// Note [8-bit states]
// Blocks of 256 elements, each with one float, its scale: the value of largest magnitude, sign included, so that this
// one is always exact and a block that is coded twice stays as it is. (With the magnitude alone a negative one would
// lose 0.7% at every step, since the map has 1 but not -1.) Every element is a code, the number of that value of a map
// which is nearest to element * (1 / scale). A block of which no value is as large as the least normal float is zero.
//
// The map is the dynamic one of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), section 1.3, as
// bitsandbytes and torchao use it: seven decades below 1, the highest with the most values. Decade d in [0, 7) has n =
// 2^d values (2^(d+1) if there are no negative ones): the middles of n equal parts of [0.1, 1], times 10^(d-6). Then 0,
// 1, and in the signed map the negatives of all but 1. Codes count the magnitudes up from 0, which is 0; a negative
// value's code is that of its magnitude subtracted from 256.
//
// To find the nearest value takes one look-up: a float in [0, 1] is known by its upper 16 bits to lie between two
// neighbouring values at most, and by its lower 16 bits on which side of the middle between them. (A middle belongs to
// the smaller value.)
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "math/macros.h"

namespace zx {

constexpr uint32_t kMagnitudeBits = 0x7fffffff;
constexpr uint32_t kOneBits = 0x3f800000;
constexpr uint32_t kLeastBits = 0x34000000;  // 2^-23: all below is nearest to 0, in both maps
constexpr uint32_t kLeastNormalBits = 0x00800000;
constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kNanBits = 0x7fc00000;
constexpr uint32_t kOneSignedCode = 128;

struct DynamicMap {
  float values[256];  // by code
  // By the upper 16 bits of a magnitude, less those of kLeastBits: what, added to the lower 16, gives the code in the
  // upper half. So its lower half is 0xffff less those of the last magnitude with the smaller code.
  uint32_t nearest[((kOneBits - kLeastBits) >> 16) + 1];
};

// The largest float that is not above the middle between two neighbours.
consteval uint32_t middle_bits(float low, float high) {
  const double middle = (static_cast<double>(low) + static_cast<double>(high)) / 2;  // exact
  const auto rounded = static_cast<float>(middle);
  return std::bit_cast<uint32_t>(rounded) - (static_cast<double>(rounded) > middle ? 1 : 0);
}

// Not a constant expression where two middles share an entry of `nearest`.
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

// Of two such keys that of the larger magnitude is larger, and of equal ones that of the positive value; NaN's is the
// largest of all. What is never negative, and never -0, needs no more than its bits.
template <bool kHasNegatives>
ZX_HD uint32_t scale_key(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return kHasNegatives ? (bits << 1 | bits >> 31) ^ 1 : bits;
}

// From the largest key in a block. NaN where an element is NaN or infinite: then all of the block becomes NaN.
template <bool kHasNegatives>
ZX_HD float scale_of_key(uint32_t key) {
  uint32_t bits = kHasNegatives ? (key ^ 1) >> 1 | (key ^ 1) << 31 : key;
  if ((bits & kMagnitudeBits) < kLeastNormalBits) bits = 0;  // its inverse would be infinite
  if ((bits & kMagnitudeBits) >= kInfinityBits) bits = kNanBits;
  return std::bit_cast<float>(bits);
}

// `nearest` is the map's, `inverse` 1 / scale. Without negatives in the map, their product must not be negative. A
// product that is NaN, of a scale that is 0 or NaN, has code 0; the inverse of a very large scale is subnormal, and may
// be off by so much that the product is above 1.
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
