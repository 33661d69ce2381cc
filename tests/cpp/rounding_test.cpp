// The 16-bit formats against arithmetic in double, and the split master against every fp32 number.
#include "math/rounding.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "check.h"

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint32_t kSweepStride = 61;  // thinned, every low half still occurs
constexpr int kRandomPatterns = 1 << 20;
#else
constexpr uint32_t kSweepStride = 1;
constexpr int kRandomPatterns = 1 << 23;
#endif

struct Format {
  int significand_bits;  // the hidden one too
  int min_exponent;      // of the smallest normal number
  int max_exponent;      // of the largest number
};
constexpr Format kBf16{8, -126, 127};
constexpr Format kF16{11, -14, 15};

// The nearest number of the format, ties to even, as IEEE 754 defines it. Steps are powers of two, so every operation
// here is exact but nearbyint, which rounds as wanted.
double nearest_even(double x, Format format) {
  if (std::isnan(x) || std::isinf(x) || x == 0.0) return x;
  const int exponent = std::max(std::ilogb(x), format.min_exponent);
  const double step = std::ldexp(1.0, exponent - format.significand_bits + 1);
  const double rounded = std::nearbyint(x / step) * step;
  if (std::fabs(rounded) < std::ldexp(1.0, format.max_exponent + 1)) return rounded;
  return std::copysign(std::numeric_limits<double>::infinity(), x);
}

// What a bit pattern stands for, by the definition of the format.
double decoded(uint16_t bits, Format format) {
  const int mantissa_bits = format.significand_bits - 1;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << (15 - mantissa_bits)) - 1) {
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  const int shift = format.min_exponent - mantissa_bits;
  if (exponent == 0) return sign * std::ldexp(mantissa, shift);
  return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - 1 + shift);
}

bool same_number(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b && std::signbit(a) == std::signbit(b);
}

float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

void check_rounds_to_nearest_even(uint32_t bits) {
  const float x = float_of(bits);
  const bool bf16_right =
      same_number(decoded(zx::float_to_bf16(x).bits, kBf16), nearest_even(static_cast<double>(x), kBf16));
  if (!bf16_right) CHECK_EQ(bits, 0xbf16u);  // prints the pattern
  const bool f16_right =
      same_number(decoded(zx::float_to_f16(x).bits, kF16), nearest_even(static_cast<double>(x), kF16));
  if (!f16_right) CHECK_EQ(bits, 0xf16u);
}

// Over all values of the random bits a number is rounded up exactly as often as its lower half says.
TEST(stochastic_rounding_has_the_mean_of_what_is_rounded) {
  for (uint64_t pattern = 0; pattern < 0x100000000; pattern += 0x3a5f1b) {
    const auto bits = static_cast<uint32_t>(pattern);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x7f7f0000u) continue;
    uint32_t num_up = 0;
    uint32_t num_other = 0;
    for (uint32_t random = 0; random < 0x10000; ++random) {
      const uint32_t rounded = zx::float_to_bf16_stochastic(float_of(bits), random | 0xabcd0000u).bits;
      num_up += static_cast<uint32_t>(rounded == (bits >> 16) + 1);
      num_other += static_cast<uint32_t>(rounded != bits >> 16 && rounded != (bits >> 16) + 1);
    }
    CHECK_EQ(num_up, bits & 0xffffu);
    CHECK_EQ(num_other, 0u);
  }
}

TEST(stochastic_rounding_keeps_finite_what_is_finite_and_nan_what_is_nan) {
  for (const uint32_t sign : {0u, 0x80000000u}) {
    for (const uint32_t random : {0u, 1u, 0x7fffu, 0xffffu, 0xffffffffu}) {
      for (const uint32_t low : {0u, 1u, 0x8000u, 0xffffu}) {
        const uint32_t largest = zx::float_to_bf16_stochastic(float_of(sign | 0x7f7f0000u | low), random).bits;
        CHECK_EQ(largest, sign >> 16 | 0x7f7fu);
      }
      CHECK_EQ(zx::float_to_bf16_stochastic(float_of(sign | 0x7f800000u), random).bits, sign >> 16 | 0x7f80u);
      for (const uint32_t nan : {0x7f800001u, 0x7fc00000u, 0x7fffffffu}) {
        const uint32_t rounded = zx::float_to_bf16_stochastic(float_of(sign | nan), random).bits;
        CHECK_EQ(rounded, (sign | nan) >> 16 | 0x40u);
      }
    }
  }
}

}  // namespace

TEST(every_16_bit_pattern_means_what_its_format_says) {
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const auto bits = static_cast<uint16_t>(pattern);
    CHECK(same_number(static_cast<double>(zx::bf16_to_float({bits})), decoded(bits, kBf16)));
    CHECK(same_number(static_cast<double>(zx::f16_to_float({bits})), decoded(bits, kF16)));
  }
}

TEST(every_16_bit_pattern_survives_the_way_to_float_and_back) {
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const auto bits = static_cast<uint16_t>(pattern);
    const uint16_t bf16_quiet = (bits & 0x7fff) > 0x7f80 ? 0x0040 : 0;
    const uint16_t f16_quiet = (bits & 0x7fff) > 0x7c00 ? 0x0200 : 0;
    CHECK_EQ(zx::float_to_bf16(zx::bf16_to_float({bits})).bits, static_cast<uint16_t>(bits | bf16_quiet));
    CHECK_EQ(zx::float_to_f16(zx::f16_to_float({bits})).bits, static_cast<uint16_t>(bits | f16_quiet));
  }
}

TEST(random_floats_round_to_nearest_even) {
  std::mt19937 random(0);
  for (int i = 0; i < kRandomPatterns / 8; ++i) check_rounds_to_nearest_even(static_cast<uint32_t>(random()));
  std::uniform_int_distribution<uint32_t> exponent(127 - 26,
                                                   127 + 17);  // f16 with its subnormals and overflow
  for (int i = 0; i < kRandomPatterns / 8; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    check_rounds_to_nearest_even((bits & 0x807fffffu) | (exponent(random) << 23));
  }
}

TEST(floats_around_every_tie_round_to_nearest_even) {
  for (uint32_t high = 0; high < 0x10000; ++high) {
    const uint32_t bits = high << 16;
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {  // bf16
      check_rounds_to_nearest_even(bits | low);
    }
    for (const uint32_t low : {0x0fffu, 0x1000u, 0x1001u, 0x2fffu, 0x3000u, 0x3001u}) {  // f16
      check_rounds_to_nearest_even(bits | low);
    }
    const float middle =
        (zx::f16_to_float({static_cast<uint16_t>(high)}) + zx::f16_to_float({static_cast<uint16_t>(high + 1)})) /
        2;  // subnormal ones too
    for (const uint32_t neighbour : {bits_of(middle) - 1, bits_of(middle), bits_of(middle) + 1}) {
      check_rounds_to_nearest_even(neighbour);
    }
  }
}

TEST(nan_stays_nan_and_keeps_its_sign) {
  std::mt19937 random(0);
  for (int i = 0; i < 100000; ++i) {
    const uint32_t bits = static_cast<uint32_t>(random()) | 0x7f800000u;
    for (const uint32_t nan : {bits | 1u, (bits & 0xff800000u) | 1u, bits | 0x7fffffu}) {
      const uint16_t sign = nan >> 31 << 15;
      const zx::SplitMaster split = zx::split_master(float_of(nan));
      for (const uint16_t half : {zx::float_to_bf16(float_of(nan)).bits, split.param.bits}) {
        CHECK(std::isnan(decoded(half, kBf16)));
        CHECK_EQ(half & 0x8000, sign);
      }
      CHECK(std::isnan(decoded(zx::float_to_f16(float_of(nan)).bits, kF16)));
      CHECK_EQ(zx::float_to_f16(float_of(nan)).bits & 0x8000, sign);
      CHECK(std::isnan(zx::join_master(split.param, split.remainder)));
    }
  }
}

// All 2^32 patterns in an optimised build.
TEST(a_master_splits_into_its_bf16_rounded_half_away_and_joins_to_the_same_bits) {
  uint64_t num_lossy = 0;
  uint64_t num_misrounded = 0;
  for (uint32_t high = 0; high < 0x10000; high += kSweepStride) {
    uint32_t lossy = 0;
    uint32_t misrounded = 0;
    for (uint32_t low = 0; low < 0x10000; ++low) {  // nothing wider than 32 bits in here: it becomes SIMD
      const uint32_t bits = high << 16 | low;
      const zx::SplitMaster split = zx::split_master(float_of(bits));
      const uint32_t joined = bits_of(zx::join_master(split.param, split.remainder));
      const bool nan = zx::is_nan_bits(bits);
      const uint32_t half_away = (bits + 0x8000u) >> 16;  // sign and magnitude: adding half goes away from zero
      lossy += static_cast<uint32_t>(nan ? !zx::is_nan_bits(joined) : joined != bits);
      misrounded += static_cast<uint32_t>(!nan && split.param.bits != half_away);
    }
    num_lossy += lossy;
    num_misrounded += misrounded;
  }
  CHECK_EQ(num_lossy, uint64_t{0});
  CHECK_EQ(num_misrounded, uint64_t{0});
}

TEST(a_written_parameter_joins_with_any_remainder_to_what_rounds_to_it) {
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const zx::bf16 param{static_cast<uint16_t>(pattern)};
    for (const int remainder : {-32768, -32767, -1, 0, 1, 32767}) {
      const float joined = zx::join_master(param, static_cast<int16_t>(remainder));
      CHECK_EQ(std::isnan(joined), std::isnan(zx::bf16_to_float(param)));
      if (!std::isnan(joined)) CHECK_EQ(zx::split_master(joined).param.bits, param.bits);
    }
  }
}

TEST(a_pair_that_no_master_has_joins_to_the_parameter) {
  for (int remainder = 1; remainder < 32768; ++remainder) {
    for (const uint16_t zero : {0x0000, 0x8000}) {
      CHECK_EQ(bits_of(zx::join_master({zero}, static_cast<int16_t>(-remainder))), uint32_t{zero} << 16);
    }
    for (const uint16_t infinity : {0x7f80, 0xff80}) {
      CHECK_EQ(bits_of(zx::join_master({infinity}, static_cast<int16_t>(remainder))), uint32_t{infinity} << 16);
    }
  }
}
