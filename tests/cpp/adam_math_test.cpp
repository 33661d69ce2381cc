// The Adam rule's constants and its one update, in lanes that record what was asked of them.
#include "math/adam.h"

#include <bit>
#include <random>

#include "check.h"
#include "counted.h"

namespace {

using namespace zx::testing;
using zx::Adam;

constexpr Adam::Options kAdamW{1e-3, 0.9, 0.999, 1e-8, 1e-2, 0.0, 1.0, 0.0};

int64_t ulps_apart(double a, double b) {  // both positive
  return std::abs(std::bit_cast<int64_t>(a) - std::bit_cast<int64_t>(b));
}

}  // namespace

TEST(integer_power_is_within_2_ulp_of_pow) {
  for (const double base : {0.0, 0.1, 0.5, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 0.99999, 1.0 - 0x1p-53}) {
    for (int64_t exponent = 0; exponent <= 20000; ++exponent) {
      const double expected = std::pow(base, static_cast<double>(exponent));
      if (expected > 0 && expected < 0x1p-1022) continue;  // subnormal: compared below
      CHECK(ulps_apart(zx::integer_power(base, exponent), expected) <= 2);
    }
    for (const int64_t exponent : {1000000, 12345678, 1000000000}) {
      const double expected = std::pow(base, static_cast<double>(exponent));
      CHECK(std::fabs(zx::integer_power(base, exponent) - expected) <= expected * 0x1p-51 + 0x1p-1070);
    }
  }
}

TEST(bias_corrections_are_those_of_the_step) {
  const Adam::Step<double> first = Adam::fold(kAdamW, 1, 1.0);
  CHECK_EQ(first.neg_step_size, -(1e-3 / (1 - 0.9)));
  CHECK_EQ(first.bias_correction2_sqrt, std::sqrt(1 - 0.999));
  const Adam::Step<double> late = Adam::fold(kAdamW, 1000000, 1.0);
  CHECK_EQ(late.neg_step_size, -1e-3);
  CHECK_EQ(late.bias_correction2_sqrt, 1.0);
}

TEST(decay_multiplies_when_decoupled_and_joins_the_gradient_when_not) {
  Adam::Options options = kAdamW;
  Adam::Step<double> step = Adam::fold(options, 1, 1.0);
  CHECK_EQ(step.decay, 1.0 - 1e-3 * 1e-2);
  CHECK(!step.is.has_l2);
  options.decoupled = 0.0;
  step = Adam::fold(options, 1, 1.0);
  CHECK_EQ(step.decay, 1.0);
  CHECK_EQ(step.l2, 1e-2);
  CHECK(step.is.has_l2);
  options.weight_decay = 0.0;
  CHECK(!Adam::fold(options, 1, 1.0).is.has_l2);
}

TEST(maximize_turns_the_gradient_around) {
  Adam::Options options = kAdamW;
  CHECK_EQ(Adam::fold(options, 1, 0.25).grad_scale, 0.25);
  options.maximize = 1.0;
  CHECK_EQ(Adam::fold(options, 1, 0.25).grad_scale, -0.25);
}

TEST(lerp_starts_from_the_nearer_end) {
  Adam::Options options = kAdamW;
  for (const double beta1 : {0.0, 0.1, 0.4, 0.5, 0.6, 0.9, 0.99}) {
    options.beta1 = beta1;
    const Adam::Step<float> step = folded<Adam>(options, 1);
    CHECK_EQ(step.is.lerp_from_grad, 1.0 - beta1 >= 0.5);
    const auto weight = static_cast<float>(1.0 - beta1);
    CHECK_EQ(step.lerp_weight, step.is.lerp_from_grad ? weight - 1.0F : weight);
  }
}

// fma(grad, l2, ...) once with L2; lerp and second moment one each; nothing else is fused.
TEST(every_fma_is_spelled_and_no_product_meets_a_sum) {
  Adam::Options options = kAdamW;
  forget_counts();
  updated<Adam, 2>(folded<Adam>(options, 3), 0.5F, 1.0F, {0.1F, 0.2F});
  CHECK_EQ(num_fma, 2);
  CHECK_EQ(num_products, 5);  // scale, decay, weight * grad, beta2 * exp_avg_sq, step size * exp_avg
  CHECK_EQ(num_sums, 3);      // grad - exp_avg, + eps, the parameter
  options.decoupled = 0.0;
  forget_counts();
  updated<Adam, 3>(folded<Adam>(options, 3), 0.5F, 1.0F, {0.1F, 0.2F, 0.3F});
  CHECK_EQ(num_fma, 3);
  CHECK_EQ(num_products, 5);
  CHECK_EQ(num_sums, 3);
}

// torch's recipe written down a second time, and a variant without fma that must differ somewhere, or the numbers
// would prove nothing.
TEST(an_update_is_torchs_recipe_bit_for_bit) {
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  int64_t num_unfused_differ = 0;
  for (int i = 0; i < 20000; ++i) {
    Adam::Options options = kAdamW;
    options.beta2 = 0.9;  // a small one lets the last bits of grad^2 matter
    options.beta1 = i % 2 ? 0.9 : 0.3;
    options.decoupled = i % 4 < 2 ? 1.0 : 0.0;
    const Adam::Step<float> s = folded<Adam>(options, 1 + i % 50, 0.75);
    const float p = normal(random);
    const float m = normal(random);
    const float v = std::fabs(normal(random));
    const float vmax = std::fabs(normal(random));
    const float raw = normal(random);

    float g = raw * 0.75F;
    if (options.decoupled == 0.0) g = std::fma(p, 1e-2F, g);
    const auto w = static_cast<float>(1 - options.beta1);
    const float m1 = w < 0.5F ? std::fma(w, g - m, m) : std::fma(w - 1.0F, g - m, g);
    const auto w2 = static_cast<float>(1 - 0.9);
    const float v1 = std::fma(w2 * g, g, v * 0.9F);
    num_unfused_differ += (w2 * g) * g + v * 0.9F != v1;
    const float decayed = options.decoupled != 0.0 ? p * static_cast<float>(1.0 - 1e-3 * 1e-2) : p;
    for (const bool amsgrad : {false, true}) {
      const float second = amsgrad ? std::fmax(vmax, v1) : v1;
      const float denom = std::sqrt(second) / s.bias_correction2_sqrt + 1e-8F;
      const float p1 = decayed + (s.neg_step_size * m1) / denom;
      const auto check = [&](float param, float exp_avg, float exp_avg_sq) {
        CHECK_EQ(exp_avg, m1);
        CHECK_EQ(exp_avg_sq, v1);
        CHECK_EQ(param, p1);
      };
      if (amsgrad) {
        const auto after = updated<Adam, 3>(s, raw, p, {m, v, vmax});
        check(after.param.x, after.state[Adam::kExpAvg].x, after.state[Adam::kExpAvgSq].x);
        CHECK_EQ(after.state[Adam::kMaxExpAvgSq].x, second);
      } else {
        const auto after = updated<Adam, 2>(s, raw, p, {m, v});
        check(after.param.x, after.state[Adam::kExpAvg].x, after.state[Adam::kExpAvgSq].x);
      }
    }
  }
  CHECK(num_unfused_differ > 1000);
}
