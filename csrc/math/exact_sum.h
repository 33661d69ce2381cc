// Note [Norms are summed exactly]
// A gradient norm must not depend on bucket sizes, shard borders, threads or the order in which shards are reduced, but
// a floating-point sum depends on the order of its terms. So each block of 256 elements gives one double, summed in a
// fixed order, and these partials are added without rounding: a double is a 53-bit integer times a power of two, and
// the sum is kept as digits of 32 bits in 64-bit limbs that cover the whole range of double. Integer addition is
// associative, so ranks can all-reduce the limbs, and the sum is rounded once, when it is read.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "math/macros.h"

namespace zx {

// 2098 bits from 2^-1074 to 2^1023, two digits more for the carry, then the counters.
constexpr int kExactDigits = 68;
constexpr int kExactNonFinite = kExactDigits;  // elements that are NaN or infinite, at least one a block
constexpr int kExactNan = kExactDigits + 1;    // partials that are NaN
constexpr int kExactInf = kExactDigits + 2;    // partials that are infinite
constexpr int kExactLimbs = kExactDigits + 3;

// The limbs that adding one partial changes: limbs[first] and the two after it.
struct ExactTerm {
  int first;
  uint64_t added[3];
};

// `partial` must not be negative.
ZX_HD ExactTerm exact_term(double partial) {
  const uint64_t bits = std::bit_cast<uint64_t>(partial);
  const uint64_t exponent = (bits >> 52) & 0x7ff;
  uint64_t mantissa = bits & ((uint64_t{1} << 52) - 1);
  if (exponent == 0x7ff) return {mantissa ? kExactNan : kExactInf, {1, 0, 0}};
  if (exponent != 0) mantissa |= uint64_t{1} << 52;
  const uint64_t position = exponent == 0 ? 0 : exponent - 1;  // of the mantissa's last bit, above 2^-1074
  const int shift = static_cast<int>(position & 31);
  const uint64_t low = mantissa << shift;
  const uint64_t high = shift == 0 ? 0 : mantissa >> (64 - shift);
  return {static_cast<int>(position >> 5), {low & 0xffffffffu, low >> 32, high}};
}

// Up to 2^31 additions fit before a carry is needed.
ZX_HD void exact_add(int64_t* limbs, double partial) {
  const ExactTerm term = exact_term(partial);
  for (int i = 0; i < 3; ++i) {  // a count of non-finite partials may be the last limb
    if (term.added[i] != 0) limbs[term.first + i] += static_cast<int64_t>(term.added[i]);
  }
}

// Brings every digit under 2^32, so that up to 2^31 such sums can be added limb by limb.
ZX_HD void exact_carry(int64_t* limbs) {
  int64_t carry = 0;
  for (int i = 0; i < kExactDigits; ++i) {
    const int64_t value = limbs[i] + carry;
    limbs[i] = value & 0xffffffff;
    carry = value >> 32;
  }
}

// The sum, rounded once to the nearest double (ties to even). Carries first.
ZX_HD double exact_value(int64_t* limbs) {
  if (limbs[kExactNan] > 0) return std::numeric_limits<double>::quiet_NaN();
  if (limbs[kExactInf] > 0) return std::numeric_limits<double>::infinity();
  exact_carry(limbs);
  int top = kExactDigits - 1;
  while (top > 2 && limbs[top] == 0) --top;
  // The top digit is below 2^32 and not 0: three digits hold at least 65 significant bits, more than double's 53. The
  // digits below them only matter as a sticky bit.
  uint64_t high = (static_cast<uint64_t>(limbs[top]) << 32) | static_cast<uint64_t>(limbs[top - 1]);
  uint64_t low = static_cast<uint64_t>(limbs[top - 2]) << 32;
  bool sticky = false;
  for (int i = 0; i < top - 2; ++i) sticky = sticky || limbs[i] != 0;
  int exponent = 32 * (top - 1) - 1074;  // of high's last bit
  while ((high | low) != 0 && (high >> 63) == 0) {
    high = (high << 1) | (low >> 63);
    low <<= 1;
    --exponent;
  }
  if (low != 0 || sticky) high |= 1;  // below the rounding position: 63 - 52 > 1
  return std::ldexp(static_cast<double>(high), exponent);
}

}  // namespace zx
