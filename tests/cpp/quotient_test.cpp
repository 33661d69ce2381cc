// A quotient by a known inverse has the bits of a division.
#include "math/quotient.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "check.h"
#include "math/scalar_lane.h"

namespace {

using Lane = zx::ScalarLane<float>;

#if defined(__SANITIZE_ADDRESS__)
constexpr uint32_t kStride = 61;  // thinned
#else
constexpr uint32_t kStride = 1;
#endif

bool is_exact(float a, float b) {
  const float found = zx::quotient_by_inverse(Lane{a}, Lane{b}, Lane{1.0f / b}).x;
  return std::bit_cast<uint32_t>(found) == std::bit_cast<uint32_t>(a / b);
}

// Mantissas repeat, so two octaves of dividends stand for all.
TEST(every_dividend_is_divided_exactly) {
  std::mt19937 random(0);
  std::uniform_real_distribution<float> ordinary(0x1p-20f, 1.0f);
  std::vector<float> divisors{0x1p-20f, 0x1.000002p-20f, 0x1.555556p-3f, 0x1.fffffcp-1f, 0x1.fffffep-1f, 1.0f};
  for (int i = 0; i < 6; ++i) divisors.push_back(ordinary(random));
  for (const float b : divisors) {
    int64_t num_wrong = 0;
    for (uint32_t bits = 0x3f800000; bits < 0x40800000; bits += kStride)
      num_wrong += !is_exact(std::bit_cast<float>(bits), b);
    CHECK_EQ(num_wrong, int64_t{0});
  }
}

TEST(roots_of_all_sizes_are_divided_exactly) {
  std::mt19937 random(1);
  std::uniform_int_distribution<uint32_t> radicands(0, 0x7f800000);  // subnormal ones and infinity too
  std::uniform_int_distribution<uint32_t> divisors(0x35800000, 0x3f800000);
  int64_t num_wrong = 0;
  for (int i = 0; i < 2'000'000; ++i) {
    num_wrong += !is_exact(std::sqrt(std::bit_cast<float>(radicands(random))), std::bit_cast<float>(divisors(random)));
  }
  CHECK_EQ(num_wrong, int64_t{0});
  for (const float root : {0.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (const float b : {0x1p-20f, 0.3f, 1.0f}) CHECK(is_exact(root, b));
  }
}

}  // namespace
