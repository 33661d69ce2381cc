// 8-bit states in vectors: values and codes are those of the map's tables, for every code and every float. The tables
// are held against the map's definition in dynamic_map_test.cpp.
#include "elements.h"
#include "math/dynamic_map.h"
#include "math/map_arithmetic.h"
#include "math/scalar_lane.h"
#include "math/state.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define ZX_LAMBDA __attribute__((always_inline))

namespace zx {
namespace {

using Block = std::array<float, kStateBlock>;

// The functions of map_vectors.h, for one map and instruction set.
struct VectorsOfMap {
  int64_t (*wrong_values)(float scale);
  bool (*has_codes)(const float* values, float inverse, const uint8_t* expected);
  int64_t (*groups_in_doubt)(const float* values);
  int64_t num_groups;
};

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define ZX_SIMD_AVX2
namespace avx2 {
// clang-format off: in this order
#include "cpu/simd.h"
#include "cpu/simd_int.h"
#include "cpu/simd_map.h"
#include "map_vectors.h"
// clang-format on
}  // namespace avx2
#undef ZX_SIMD_AVX2
#pragma GCC pop_options

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // see kernels_avx512.cpp
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define ZX_SIMD_AVX512
namespace avx512 {
// clang-format off: in this order
#include "cpu/simd.h"
#include "cpu/simd_int.h"
#include "cpu/simd_map.h"
#include "map_vectors.h"
// clang-format on
#pragma GCC push_options
#pragma GCC target("avx512vbmi")
#include "cpu/map_vbmi.h"
template <bool kHasNegatives>
__attribute__((noinline)) void decode_with_vbmi(const uint8_t* codes, float scale, float* values) {
  decode_block_vbmi<kHasNegatives>(codes, scale, values);
}
template <bool kHasNegatives>
constexpr VectorsOfMap vectors_with_vbmi() {
  VectorsOfMap found = kVectors<kHasNegatives>;
  found.wrong_values = wrong_values<kHasNegatives, decode_with_vbmi<kHasNegatives>>;
  return found;
}
#pragma GCC pop_options
}  // namespace avx512
#undef ZX_SIMD_AVX512
#pragma GCC pop_options

// For every instruction set that this CPU has and that encodes in a way of its own; with VBMI only decoding is another.
template <bool kHasNegatives>
std::vector<VectorsOfMap> encoders_of_map() {
  std::vector<VectorsOfMap> found;
  for (const std::string& isa : supported_isas()) {
    if (isa == "avx2") found.push_back(avx2::kVectors<kHasNegatives>);
    if (isa == "avx512") found.push_back(avx512::kVectors<kHasNegatives>);
  }
  return found;
}
template <bool kHasNegatives>
std::vector<VectorsOfMap> decoders_of_map() {
  std::vector<VectorsOfMap> found = encoders_of_map<kHasNegatives>();
  for (const std::string& isa : supported_isas()) {
    if (isa == "avx512vbmi") found.push_back(avx512::vectors_with_vbmi<kHasNegatives>());
  }
  return found;
}

// The codes of a block by the table.
template <bool kHasNegatives>
std::array<uint8_t, kStateBlock> codes_of(const Block& values, float inverse) {
  const DynamicMap& map = kHasNegatives ? kSignedMap : kUnsignedMap;
  std::array<uint8_t, kStateBlock> codes;
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = encode<kHasNegatives>(map.nearest, values[i], inverse);
  return codes;
}

const float kNan = std::numeric_limits<float>::quiet_NaN();
const float kInfinity = std::numeric_limits<float>::infinity();

#if defined(__SANITIZE_ADDRESS__)
constexpr uint32_t kStride = 61;  // thinned
#else
constexpr uint32_t kStride = 1;
#endif
constexpr uint32_t kTinyStride = 997;         // of floats below the next, which are far from what decides
constexpr uint32_t kTinyBits = 0x33800000;    // 2^-24
constexpr uint32_t kMostBits = kOneBits + 4;  // 1 + 2^-21: no value is larger, beside its scale

template <bool kHasNegatives>
void check_every_value() {
  for (const VectorsOfMap& vectors : decoders_of_map<kHasNegatives>()) {
    for (const float scale : {1.0f, 0x1.234568p-3f, 3.7e30f, 0x1p-126f, 0.0f, kInfinity, kNan}) {
      CHECK_EQ(vectors.wrong_values(scale), int64_t{0});
      CHECK_EQ(vectors.wrong_values(-scale), int64_t{0});
    }
  }
}
TEST(every_code_is_decoded_to_the_value_of_the_table) {
  check_every_value<true>();
  check_every_value<false>();
}

template <bool kHasNegatives>
void check_every_magnitude(float sign) {
  const std::vector<VectorsOfMap> tested = encoders_of_map<kHasNegatives>();
  int64_t num_wrong = 0;
  for (uint32_t bits = 0; bits < kMostBits;) {
    Block values;
    for (float& value : values) {
      value = sign * std::bit_cast<float>(std::min(bits, kMostBits));
      bits += bits < kTinyBits ? kTinyStride : kStride;
    }
    const auto expected = codes_of<kHasNegatives>(values, 1.0f);
    for (const VectorsOfMap& vectors : tested) num_wrong += !vectors.has_codes(values.data(), 1.0f, expected.data());
  }
  CHECK_EQ(num_wrong, int64_t{0});
}
TEST(every_magnitude_is_encoded_as_by_the_table) {
  check_every_magnitude<true>(1.0f);
  check_every_magnitude<true>(-1.0f);
  check_every_magnitude<false>(1.0f);
}

// Values of all kinds that a block with this scale may have.
template <bool kHasNegatives>
Block values_for(float scale) {
  const float least = std::numeric_limits<float>::denorm_min();
  const std::array<float, 12> relative{0.0f,  1.0f, 0.3f,  1e-7f, 1e-6f,  0.999f,
                                       0.02f, kNan, -0.3f, -1.0f, -1e-6f, -0.0f};
  const std::array<float, 6> beside_zero{0.0f, least, 0x1p-127f, kNan, -least, -0.0f};
  Block values;
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t place = i * i + i / 7;
    values[i] = scale == 0.0f ? beside_zero[place % (kHasNegatives ? 6 : 4)]
                              : scale * relative[place % (kHasNegatives ? 12 : 8)];
  }
  return values;
}
template <bool kHasNegatives>
void check_scale(float scale) {
  const Block values = values_for<kHasNegatives>(scale);
  const auto expected = codes_of<kHasNegatives>(values, 1.0f / scale);
  for (const VectorsOfMap& vectors : encoders_of_map<kHasNegatives>()) {
    CHECK(vectors.has_codes(values.data(), 1.0f / scale, expected.data()));
  }
}
TEST(values_beside_any_scale_are_encoded_as_by_the_table) {
  // The inverses of large scales are subnormal, and that of 0 is infinite.
  for (const float scale : {1.0f, 0.0f, 3.7f, 0x1p-126f, 1e-20f, 0x1.8p+126f, 0x1.fffffep+127f, kNan}) {
    check_scale<true>(scale);
    check_scale<false>(scale);
    if (scale != 0.0f) check_scale<true>(-scale);
  }
}

template <bool kHasNegatives>
void check_doubt() {
  std::normal_distribution<float> normal(0.0f, 0.25f);
  for (const VectorsOfMap& vectors : encoders_of_map<kHasNegatives>()) {
    std::mt19937 random(0);
    int64_t in_doubt = 0;
    int64_t num_groups = 0;
    for (int block = 0; block < 4000; ++block, num_groups += vectors.num_groups) {
      Block values;
      for (float& value : values) {
        value = std::clamp(normal(random), -1.0f, 1.0f);
        if (!kHasNegatives) value *= value;
      }
      in_doubt += vectors.groups_in_doubt(values.data());
    }
    CHECK(in_doubt > 0);
    CHECK(in_doubt * 100 < num_groups);  // looked up, one by one
  }
}
TEST(codes_are_rarely_in_doubt) {
  check_doubt<true>();
  check_doubt<false>();
}

}  // namespace
}  // namespace zx
#endif
