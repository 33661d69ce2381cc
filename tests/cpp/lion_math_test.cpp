// The Lion rule's constants and its one update, in lanes that record what was asked of them; and sign(), which no other
// rule needs.
#include "math/lion.h"

#include <bit>
#include <limits>
#include <random>

#include "check.h"
#include "counted.h"

namespace {

using namespace zx::testing;
using zx::Lion;

constexpr Lion::Options kDecayed{1e-2, 0.9, 0.99, 0.1, 0.0};

template <class T>
T sign_of(T x) {
  return sign(zx::ScalarLane<T>{x}).x;
}

template <class T>
void check_sign() {
  using Limits = std::numeric_limits<T>;
  for (const T x : {Limits::denorm_min(), Limits::min(), T(1e-3), T(1), T(2), Limits::max(), Limits::infinity()}) {
    CHECK_EQ(sign_of(x), T(1));
    CHECK_EQ(sign_of(-x), T(-1));
  }
  for (const T zero : {T(0), -T(0)}) {
    CHECK_EQ(sign_of(zero), T(0));
    CHECK(!std::signbit(sign_of(zero)));
  }
  CHECK(std::isnan(sign_of(Limits::quiet_NaN())));
  CHECK(std::isnan(sign_of(-Limits::quiet_NaN())));
}

}  // namespace

TEST(sign_is_0_for_either_zero_and_nan_for_nan) {
  check_sign<float>();
  check_sign<double>();
}

TEST(maximize_turns_the_gradient_around) {
  Lion::Options options = kDecayed;
  CHECK_EQ(Lion::fold(options, 1, 0.25).grad_scale, 0.25);
  options.maximize = 1.0;
  CHECK_EQ(Lion::fold(options, 1, 0.25).grad_scale, -0.25);
}

TEST(every_step_is_counted) { CHECK(Lion::counts_step(kDecayed)); }

TEST(nan_reaches_parameter_and_state) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& [grad, state] : {std::pair{nan, 1.0F}, {1.0F, nan}}) {
    const auto after = updated<Lion, 1>(folded<Lion>(kDecayed, 1), grad, 1.0F, {state});
    CHECK(std::isnan(after.param.x));
    CHECK(std::isnan(after.state[Lion::kExpAvg].x));
  }
}

// The two averages and the parameter are one each. Nothing else is fused.
TEST(every_fma_is_spelled_and_no_product_meets_a_sum) {
  forget_counts();
  updated<Lion, 1>(folded<Lion>(kDecayed, 3), 0.5F, 1.0F, {0.1F});
  CHECK_EQ(num_fma, 3);
  CHECK_EQ(num_products, 4);  // scale, beta1 and beta2 * exp_avg, decay
  CHECK_EQ(num_sums, 0);
}

// The paper's recipe written down a second time, and a variant without fma that must differ somewhere, or the numbers
// would prove nothing.
TEST(an_update_is_the_papers_recipe_bit_for_bit) {
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  int64_t num_unfused_differ = 0;
  for (int i = 0; i < 20000; ++i) {
    Lion::Options options = kDecayed;
    options.beta2 = i % 2 ? 0.99 : 0.3;  // a small one lets the last bits of the gradient matter
    options.weight_decay = i % 4 < 2 ? 0.1 : 0.0;
    const float p = normal(random);
    const float m = normal(random);
    const float raw = normal(random);

    const float g = raw * 0.75F;
    const float average = std::fma(g, static_cast<float>(1.0 - 0.9), m * 0.9F);
    const auto beta2 = static_cast<float>(options.beta2);
    const auto weight2 = static_cast<float>(1.0 - options.beta2);
    const float m1 = std::fma(g, weight2, m * beta2);
    num_unfused_differ += g * weight2 + m * beta2 != m1;
    const float decayed = p * static_cast<float>(1.0 - 1e-2 * options.weight_decay);
    const float p1 = decayed - 1e-2F * static_cast<float>((average > 0) - (average < 0));

    const auto after = updated<Lion, 1>(folded<Lion>(options, 1 + i % 50, 0.75), raw, p, {m});
    CHECK_EQ(after.state[Lion::kExpAvg].x, m1);
    CHECK_EQ(after.param.x, p1);
  }
  CHECK(num_unfused_differ > 1000);
}
