// Exact sums against Shewchuk's, which also rounds once but works in another way. See Note [Norms are summed exactly].
#include "math/exact_sum.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>

#include "check.h"

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kMax = std::numeric_limits<double>::max();
constexpr double kTiny = std::numeric_limits<double>::denorm_min();

using Words = std::array<int64_t, zx::kExactLimbs>;

Words words_of(const std::vector<double>& partials) {
  Words limbs{};
  for (const double partial : partials) zx::exact_add(limbs.data(), partial);
  return limbs;
}

double value_of(Words limbs) { return zx::exact_value(limbs.data()); }
double exact(const std::vector<double>& partials) { return value_of(words_of(partials)); }

Words carried(Words limbs) {
  zx::exact_carry(limbs.data());
  return limbs;
}

// Shewchuk, "Adaptive Precision Floating-Point Arithmetic" (1997), as Python's math.fsum does it: the sum as doubles
// that don't overlap, rounded to even at the end. Sums stay below overflow.
double shewchuk(const std::vector<double>& partials) {
  std::vector<double> parts;
  for (double x : partials) {
    size_t kept = 0;
    for (double y : parts) {
      if (std::fabs(x) < std::fabs(y)) std::swap(x, y);
      const double high = x + y;
      const double low = y - (high - x);
      if (low != 0.0) parts[kept++] = low;
      x = high;
    }
    parts.resize(kept);
    parts.push_back(x);
  }
  double high = 0.0;
  double low = 0.0;
  while (!parts.empty() && low == 0.0) {
    const double x = high;
    const double y = parts.back();
    parts.pop_back();
    high = x + y;
    low = y - (high - x);
  }
  // What lies below the first remainder decides a tie.
  if (!parts.empty() && ((low < 0.0 && parts.back() < 0.0) || (low > 0.0 && parts.back() > 0.0))) {
    const double twice = low * 2.0;
    const double beyond = high + twice;
    if (beyond - high == twice) high = beyond;
  }
  return high;
}

// Numbers with random mantissas and exponents in [low, high], some of them zero.
std::vector<double> random_partials(std::mt19937_64& random, size_t count, int low, int high) {
  std::uniform_int_distribution<int> exponent(low, high);
  std::vector<double> partials;
  for (size_t i = 0; i < count; ++i) {
    const auto mantissa = static_cast<double>(random() >> (11 + random() % 50));
    partials.push_back(std::ldexp(mantissa, exponent(random) - 53));
  }
  return partials;
}

}  // namespace

TEST(one_number_is_its_own_sum) {
  std::mt19937_64 random(0);
  for (const double x : {0.0, kTiny, 2 * kTiny, 0x1p-1022 - kTiny, 0x1p-1022, 1.0, 0x1.fffffffffffffp+52, kMax}) {
    CHECK_EQ(exact({x}), x);
  }
  for (int i = 0; i < 100000; ++i) {
    const double x = std::fabs(std::bit_cast<double>(random()));
    if (std::isfinite(x)) CHECK_EQ(exact({x}), x);
  }
}

TEST(nothing_sums_to_zero) {
  CHECK_EQ(exact({}), 0.0);
  CHECK_EQ(exact({-0.0}), 0.0);
  CHECK(!std::signbit(exact({-0.0})));
}

TEST(sums_are_rounded_once) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 3000; ++round) {
    const size_t count = 1 + random() % 40;
    const int width = static_cast<int>(random() % 200);
    const int low = static_cast<int>(random() % (2000 - static_cast<unsigned>(width))) - 1050;
    const std::vector<double> partials = random_partials(random, count, low, low + width);
    CHECK_EQ(exact(partials), shewchuk(partials));
  }
}

TEST(huge_and_tiny_numbers_meet_without_loss) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 500; ++round) {
    std::vector<double> partials = random_partials(random, 20, -1074, 1010);
    CHECK_EQ(exact(partials), shewchuk(partials));
  }
}

TEST(subnormals_add_exactly) {
  CHECK_EQ(exact(std::vector<double>(1000, kTiny)), 1000 * kTiny);
  CHECK_EQ(exact({0x1p-1022 - kTiny, kTiny}), 0x1p-1022);
  CHECK_EQ(exact({0x1p-1022 - kTiny, 0x1p-1022 - kTiny}), 0x1p-1021 - 2 * kTiny);
}

TEST(ties_go_to_even_and_one_bit_far_below_breaks_them) {
  CHECK_EQ(exact({0x1p53, 1.0}), 0x1p53);
  CHECK_EQ(exact({0x1p53, 1.0, kTiny}), 0x1p53 + 2);
  CHECK_EQ(exact({0x1p53 + 2, 1.0}), 0x1p53 + 4);
  CHECK_EQ(exact({0x1p53, 0.5, 0.25}), 0x1p53);
  CHECK_EQ(exact({1.0, 0x1p-53}), 1.0);
  CHECK_EQ(exact({1.0, 0x1p-53, kTiny}), 1.0 + 0x1p-52);
  CHECK_EQ(exact({1.0 + 0x1p-52, 0x1p-53}), 1.0 + 0x1p-51);
  for (int shift = 0; shift < 64; ++shift) {  // wherever the tie lies in its digit
    CHECK_EQ(exact({std::ldexp(0x1p53, shift), std::ldexp(1.0, shift)}), std::ldexp(0x1p53, shift));
    CHECK_EQ(exact({std::ldexp(0x1p53, shift), std::ldexp(1.0, shift), 0x1p-60}), std::ldexp(0x1p53 + 2, shift));
  }
}

TEST(the_order_of_additions_and_carries_changes_no_word) {
  std::mt19937_64 random(3);
  std::vector<double> partials = random_partials(random, 500, -1000, 1000);
  const Words once = carried(words_of(partials));
  for (int round = 0; round < 20; ++round) {
    std::shuffle(partials.begin(), partials.end(), random);
    CHECK_EQ(carried(words_of(partials)), once);
    Words often{};
    for (const double partial : partials) {
      zx::exact_add(often.data(), partial);
      if (random() % 3 == 0) zx::exact_carry(often.data());
    }
    CHECK_EQ(carried(often), once);
  }
}

TEST(words_of_ranks_add_up_to_the_words_of_all) {
  std::mt19937_64 random(4);
  std::vector<double> all;
  Words total{};
  for (int rank = 0; rank < 8; ++rank) {
    const std::vector<double> partials = random_partials(random, 100, -300, 300);
    all.insert(all.end(), partials.begin(), partials.end());
    const Words limbs = carried(words_of(partials));
    for (size_t word = 0; word < limbs.size(); ++word) total[word] += limbs[word];
  }
  CHECK_EQ(carried(total), carried(words_of(all)));
  CHECK_EQ(value_of(total), shewchuk(all));
}

TEST(carries_run_through_all_digits) {
  CHECK_EQ(exact({0x1p53 - 1, 1.0}), 0x1p53);
  std::vector<double> ones;  // 2^-1074 + (2^-1074 + 2^-1073 + ... + 2^900) = 2^901
  for (int exponent = -1074; exponent <= 900; ++exponent) ones.push_back(std::ldexp(1.0, exponent));
  ones.push_back(kTiny);
  const Words limbs = carried(words_of(ones));
  CHECK_EQ(value_of(limbs), std::ldexp(1.0, 901));
  CHECK_EQ(std::count(limbs.begin(), limbs.end(), 0), static_cast<std::ptrdiff_t>(limbs.size()) - 1);
}

TEST(as_many_additions_as_promised_fit_before_a_carry) {
  Words limbs{};
  const double full = 0x1.fffffffffffffp+52;  // its digits are as full as they get: 2^53 - 1
  zx::exact_add(limbs.data(), full);
  for (int64_t& word : limbs) word *= int64_t{1} << 31;  // the same as adding it 2^31 times
  CHECK_EQ(value_of(limbs), std::ldexp(full, 31));
}

TEST(a_sum_past_the_largest_double_is_infinite) {
  CHECK_EQ(exact({kMax, kMax}), kInf);
  CHECK_EQ(exact(std::vector<double>(100000, kMax)), kInf);
  CHECK_EQ(exact({kMax, 0x1p970}), kInf);                 // the tie goes up
  CHECK_EQ(exact({kMax, 0x1.fffffffffffffp+969}), kMax);  // below it
}

TEST(nan_wins_over_infinity_and_infinity_over_numbers) {
  CHECK_EQ(exact({1.0, kInf}), kInf);
  CHECK(std::isnan(exact({1.0, kNan})));
  CHECK(std::isnan(exact({kInf, kNan, kInf})));
}
