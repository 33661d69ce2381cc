// Roots and quotients without checks, against IEEE's.
#include "cuda/unchecked.cuh"

#include <random>

#include "check.h"

namespace {

using namespace zx::cuda;
using zx::Adam;

float of_bits(uint32_t bits) { return std::bit_cast<float>(bits); }

// Uniform over the floats of either sign from `least` to `most`.
class Floats {
 public:
  Floats(float least, float most, bool negative)
      : bits_(std::bit_cast<uint32_t>(least), std::bit_cast<uint32_t>(most)), negative_(negative) {}
  float operator()(std::mt19937& random) {
    const float x = of_bits(bits_(random));
    return negative_ && random() % 2 == 0 ? -x : x;
  }

 private:
  std::uniform_int_distribution<uint32_t> bits_;
  bool negative_;
};

// Powers of four leave the digits of a root as they are: all of two octaves are all there are. Of an approximation that
// is off by a unit everywhere up to 3 of these would be wrong; the device's is not, see
// tests/gpu/test_kernel_update.py.
TEST(every_root_is_rounded_correctly) {
  int64_t num_wrong = 0;
  for (uint32_t bits = 0x3f800000; bits < 0x40800000; ++bits) {
    num_wrong += unchecked_sqrt(of_bits(bits)) != std::sqrt(of_bits(bits));
  }
  CHECK_EQ(num_wrong, int64_t{0});
}

TEST(roots_are_right_between_the_bounds) {
  std::mt19937 random(0);
  Floats seconds(Adam::kLeastRadicand, Adam::kMostRadicand, false);
  int64_t num_wrong = 0;
  for (int i = 0; i < 3000000; ++i) {
    const float x = seconds(random);
    num_wrong += unchecked_sqrt(x) != std::sqrt(x);
  }
  for (const float x : {Adam::kLeastRadicand, Adam::kMostRadicand}) num_wrong += unchecked_sqrt(x) != std::sqrt(x);
  CHECK_EQ(num_wrong, int64_t{0});
}

TEST(quotients_are_rounded_correctly) {
  std::mt19937 random(0);
  Floats numerators(Adam::kLeastNumerator, Adam::kMostNumerator, true);
  Floats denominators(0x1p-50f, 0x1p+41f, false);
  for (const int error : {-1, 0, 1}) {
    on_host::approximation_error = error;
    int64_t num_wrong = 0;
    for (int i = 0; i < 5000000; ++i) {
      const float a = numerators(random);
      // Half of them with all but the last three digits 1, where inverses are hard to round.
      const float b =
          i % 2 == 0 ? denominators(random) : of_bits(std::bit_cast<uint32_t>(denominators(random)) | 0x7ffff8);
      num_wrong += unchecked_quotient(a, b) != a / b;
    }
    CHECK_EQ(num_wrong, int64_t{0});
  }
  on_host::approximation_error = 0;
}

TEST(quotients_by_a_constant_are_rounded_correctly) {
  std::mt19937 random(0);
  Floats roots(0x1p-50f, 0x1p+20f, false);
  Floats constants(0x1p-20f, 1.0f, false);
  int64_t num_wrong = 0;
  for (int i = 0; i < 10000000; ++i) {
    const float a = roots(random);
    const float b = constants(random);
    num_wrong += unchecked_quotient(a, b, 1.0f / b) != a / b;
  }
  CHECK_EQ(num_wrong, int64_t{0});
}

TEST(what_is_ordinary_ends_at_the_bounds) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float x : {0.0f, -0.0f, infinity, -infinity, std::numeric_limits<float>::quiet_NaN(), 0x1p-149f}) {
    CHECK(!lies_between<0>(Adam::kLeastRadicand, x, Adam::kMostRadicand));
    CHECK(!lies_between<1>(Adam::kLeastNumerator, x, Adam::kMostNumerator));
  }
  for (const float sign : {1.0f, -1.0f}) {
    for (const float x : {Adam::kLeastNumerator, 1e-12f, 1.0f, Adam::kMostNumerator}) {
      CHECK(lies_between<1>(Adam::kLeastNumerator, sign * x, Adam::kMostNumerator));
      CHECK_EQ(lies_between<0>(Adam::kLeastNumerator, sign * x, Adam::kMostNumerator), sign > 0);
    }
    CHECK(!lies_between<1>(Adam::kLeastNumerator, sign * std::nextafter(Adam::kLeastNumerator, 0.0f),
                           Adam::kMostNumerator));
    CHECK(!lies_between<1>(Adam::kLeastNumerator, sign * std::nextafter(Adam::kMostNumerator, infinity),
                           Adam::kMostNumerator));
  }
}

}  // namespace
