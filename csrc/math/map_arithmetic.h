// The constants of Note [The map without tables] in dynamic_map.h, derived from the map.
#pragma once

#include <bit>
#include <cstdint>

#include "math/dynamic_map.h"

namespace zx {

constexpr int kDecades = 7;
constexpr int kMantissaBits = 23;
constexpr int kOneExponent = 127;

// A magnitude's position is the float from 4 to 8 that has its number in the leading bits. It is shifted so that these
// reach the upper half of a word; the lower half is the rest, which is in doubt if it is almost 1. Positions are
// computed kDoubtUlp units in the last place too low: up to twice as much below the next number there is doubt.
constexpr int kDoubtUlp = 2;
constexpr float kPositionUlp = 0x1p-21f;
constexpr float kPositionOfZero = static_cast<float>(4 * 8.0 / 9.0) - kDoubtUlp * kPositionUlp;
constexpr float kMostPosition = 8.0f - 0x1p-12f;  // of the last number of every decade, and not in doubt
constexpr float kLeastMagnitude = 0x1p-24f;       // has the number of 0

struct MapArithmetic {
  static constexpr int kEntries = 8;  // of the tables below: what looks up in them counts modulo 8

  // By the exponent of a number.
  float denominator[kEntries];
  float number_of_one;

  // By the shift of a position. Each decade has its own, and 1 the one after the last.
  float slope[kEntries];
  float border[kEntries];  // the largest magnitude of the decade
  float zero_border;

  // By bits 24 to 27 of a magnitude, which belong to a pair of octaves: the shift of its decade, or of the one below.
  uint8_t shifts[16];
  uint32_t most_rest;  // the largest one that is not in doubt
};

// The largest magnitude that is nearest to this code's.
consteval float border_of(const DynamicMap& map, int code) {
  return std::bit_cast<float>(middle_bits(map.values[code], map.values[code + 1]));
}

// Not a constant expression, so that it does not compile, if a constant is not what the note says.
consteval MapArithmetic make_map_arithmetic(bool has_negatives) {
  const DynamicMap map = make_dynamic_map(has_negatives);
  const int last_code = has_negatives ? 128 : 255;
  const int code_of_number_0 = has_negatives ? 0 : -1;
  int log = has_negatives ? 0 : 1;  // of a decade's n

  MapArithmetic made{};
  for (float& each : made.denominator) each = std::bit_cast<float>(kInfinityBits);
  made.number_of_one = static_cast<float>(last_code - code_of_number_0) - 0.5f;
  made.zero_border = border_of(map, 0);
  uint32_t octaves = std::bit_cast<uint32_t>(kLeastMagnitude) >> 24;
  double power = 1e6;  // 10^(6-d)
  int shift = 0;
  for (int d = 0; d < kDecades; ++d, ++log, power /= 10) {
    const int n = 1 << log;
    float& denominator = made.denominator[(kOneExponent + log) % MapArithmetic::kEntries];
    denominator = static_cast<float>(20.0 * n * power);
    if (static_cast<double>(denominator) != 20.0 * n * power) throw "a rounded denominator";

    shift = kMantissaBits - 16 - log;
    made.slope[shift % MapArithmetic::kEntries] = static_cast<float>(4 * 10.0 / 9.0 * power);
    const float border = border_of(map, 2 * n - 1 + code_of_number_0);
    made.border[shift % MapArithmetic::kEntries] = border;
    for (; octaves < 0x40 && std::bit_cast<float>(octaves << 24) <= border; ++octaves) {
      made.shifts[octaves % 16] = static_cast<uint8_t>(shift);
    }
    if (std::bit_cast<float>(octaves << 24) > 10 * border) throw "a pair of octaves with two borders";
  }
  made.most_rest = 0xffff - (2 * kDoubtUlp >> shift);
  if (has_negatives) {  // decade 0 has one value and a slope of its own, with which 0 ends where the position is 4
    made.slope[(kMantissaBits - 16) % MapArithmetic::kEntries] = (4.0f - kPositionOfZero) / made.zero_border;
  }
  // 1 has the position 4 of a decade that nothing else belongs to, and some more, to be without doubt.
  made.slope[(shift - 1) & (MapArithmetic::kEntries - 1)] = 4.0f + 0x1p-7f - kPositionOfZero;
  return made;
}

inline constexpr MapArithmetic kSignedArithmetic = make_map_arithmetic(true);
inline constexpr MapArithmetic kUnsignedArithmetic = make_map_arithmetic(false);

}  // namespace zx
