// 8-bit codes: the nearest value of the map, found by comparison with all of them, for everything that decides.
#include "math/dynamic_map.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "check.h"

namespace {

using zx::DynamicMap;

// The magnitudes of a map, upwards, by code.
std::vector<float> magnitudes_of(const DynamicMap& map, int count) { return {map.values, map.values + count}; }

// The smaller one of two that are equally near.
size_t nearest(const std::vector<float>& magnitudes, float value) {
  const auto distance = [value](float x) { return std::fabs(static_cast<double>(x) - static_cast<double>(value)); };
  return static_cast<size_t>(std::min_element(magnitudes.begin(), magnitudes.end(),
                                              [&](float a, float b) { return distance(a) < distance(b); }) -
                             magnitudes.begin());
}

// Values in [0, 1]: each of the map, each middle between two, their neighbours, the ends of octaves, and random ones.
std::vector<float> telling_values(const std::vector<float>& magnitudes) {
  std::vector<float> values{0.0f, std::numeric_limits<float>::denorm_min(), 0x1p-126f, 0x1p-24f};
  const auto add_around = [&values](float center) {
    for (int steps = -3; steps <= 3; ++steps) {
      const auto bits = static_cast<int64_t>(std::bit_cast<uint32_t>(center)) + steps;
      if (bits >= 0 && bits <= 0x3f800000) values.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
    }
  };
  for (size_t i = 0; i + 1 < magnitudes.size(); ++i) {
    add_around(magnitudes[i]);
    add_around(static_cast<float>((static_cast<double>(magnitudes[i]) + magnitudes[i + 1]) / 2));
  }
  for (uint32_t upper = 0x3380; upper <= 0x3f80; ++upper) add_around(std::bit_cast<float>(upper << 16));
  std::mt19937 random(0);
  std::uniform_int_distribution<uint32_t> bits(0x33000000, 0x3f800000);
  for (int i = 0; i < 100000; ++i) values.push_back(std::bit_cast<float>(bits(random)));
  return values;
}

TEST(a_code_is_that_of_the_nearest_value) {
  const auto with_negatives = magnitudes_of(zx::kSignedMap, 129);
  const auto without = magnitudes_of(zx::kUnsignedMap, 256);
  CHECK(std::is_sorted(with_negatives.begin(), with_negatives.end()));
  CHECK(std::is_sorted(without.begin(), without.end()));
  int64_t num_wrong = 0;
  for (const float value : telling_values(with_negatives)) {
    const size_t code = nearest(with_negatives, value);
    const size_t mirrored = (256 - std::min<size_t>(code, 127)) % 256;
    num_wrong += zx::encode<true>(zx::kSignedMap.nearest, value, 1.0f) != code;
    num_wrong += zx::encode<true>(zx::kSignedMap.nearest, -value, 1.0f) != mirrored;
    num_wrong += zx::encode<true>(zx::kSignedMap.nearest, -value, -1.0f) != code;  // a negative scale
  }
  for (const float value : telling_values(without)) {
    num_wrong += zx::encode<false>(zx::kUnsignedMap.nearest, value, 1.0f) != nearest(without, value);
  }
  CHECK_EQ(num_wrong, int64_t{0});
}

TEST(every_code_decodes_to_what_is_coded_alike) {
  // Of the last one but one and what is above, the inverse is subnormal.
  for (const float scale : {1.0f, -1.0f, 3.7f, -1e-30f, 1e30f, 0x1p-100f, 0x1.8p+126f, 0x1.fffffep+127f}) {
    const float inverse = 1.0f / scale;
    for (int code = 0; code < 256; ++code) {
      const auto byte = static_cast<uint8_t>(code);
      CHECK_EQ(zx::encode<true>(zx::kSignedMap.nearest, zx::decode(zx::kSignedMap.values, byte, scale), inverse), byte);
      if (scale < 0) continue;
      CHECK_EQ(zx::encode<false>(zx::kUnsignedMap.nearest, zx::decode(zx::kUnsignedMap.values, byte, scale), inverse),
               byte);
    }
  }
}

// Where a scale is small its products are subnormal, and rounded coarsely: codes may change, what they stand for must
// not.
TEST(what_a_block_stands_for_survives_the_way_there_and_back) {
  std::mt19937 random(0);
  std::uniform_int_distribution<int> codes(0, 255);
  for (uint32_t bits = zx::kLeastNormalBits; bits < zx::kInfinityBits; bits += 0x00234567) {
    for (const float scale : {std::bit_cast<float>(bits), -std::bit_cast<float>(bits)}) {
      for (int i = 0; i < 100; ++i) {
        const auto code = static_cast<uint8_t>(codes(random));
        const float value = zx::decode(zx::kSignedMap.values, code, scale);
        const uint8_t again = zx::encode<true>(zx::kSignedMap.nearest, value, 1.0f / scale);
        CHECK_EQ(std::fabs(zx::decode(zx::kSignedMap.values, again, scale) - value), 0.0f);
      }
    }
  }
}

TEST(the_largest_key_is_of_the_scale) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const auto scale = [](std::vector<float> values) {
    uint32_t key = 0;
    for (const float value : values) key = std::max(key, zx::scale_key<true>(value));
    return zx::scale_of_key<true>(key);
  };
  const auto scale_without = [](std::vector<float> values) {
    uint32_t key = 0;
    for (const float value : values) key = std::max(key, zx::scale_key<false>(value));
    return zx::scale_of_key<false>(key);
  };
  CHECK_EQ(scale({1.0f, -3.0f, 2.0f}), -3.0f);
  CHECK_EQ(scale({1.0f, -3.0f, 3.0f}), 3.0f);
  CHECK_EQ(scale({0.0f, -0x1p-126f}), -0x1p-126f);
  CHECK_EQ(std::bit_cast<uint32_t>(scale({0.0f, -0x1.fffffcp-127f})), uint32_t{0});  // its inverse is infinite
  CHECK_EQ(scale_without({1.0f, 3.0f, 2.0f}), 3.0f);
  CHECK_EQ(scale_without({0x1p-149f, 0x1p-126f}), 0x1p-126f);
  CHECK_EQ(scale_without({0x1p-149f, 0.0f}), 0.0f);
  for (const float zero : {0.0f, -0.0f}) CHECK_EQ(std::bit_cast<uint32_t>(scale({zero, zero})), uint32_t{0});
  for (const float bad : {nan, -nan, infinity, -infinity}) {
    CHECK_EQ(std::bit_cast<uint32_t>(scale({1.0f, bad, -1e38f})), uint32_t{0x7fc00000});
    if (bad != -infinity) CHECK_EQ(std::bit_cast<uint32_t>(scale_without({1.0f, bad, 1e38f})), uint32_t{0x7fc00000});
  }
  for (const float value : {0.0f, 1.0f, -1.0f, infinity, nan, -nan}) {
    CHECK_EQ(zx::encode<true>(zx::kSignedMap.nearest, value, nan), uint8_t{0});
    CHECK_EQ(zx::encode<false>(zx::kUnsignedMap.nearest, value, nan), uint8_t{0});
  }
  CHECK_EQ(zx::encode<true>(zx::kSignedMap.nearest, 0.0f, infinity), uint8_t{0});  // a scale of 0
}

}  // namespace
