// The SGD rule's constants and its one update, in lanes that record what was asked of them.
#include "math/sgd.h"

#include <limits>
#include <random>

#include "check.h"
#include "counted.h"

namespace {

using namespace zx::testing;
using zx::Sgd;

constexpr Sgd::Options kMomentum{0.1, 0.9, 0.3, 1e-2, 0.0, 0.0};

}  // namespace

TEST(the_buffer_is_kept_and_steps_are_counted_with_momentum_only) {
  Sgd::Options options = kMomentum;
  CHECK_EQ(Sgd::num_states(options), 1);
  CHECK(Sgd::counts_step(options));
  options.momentum = 0.0;
  CHECK_EQ(Sgd::num_states(options), 0);
  CHECK(!Sgd::counts_step(options));
}

TEST(the_first_step_is_that_of_a_buffer_without_updates) {
  CHECK(Sgd::fold(kMomentum, 1, 1.0).is.first);
  CHECK(!Sgd::fold(kMomentum, 2, 1.0).is.first);
  CHECK(!Sgd::fold(kMomentum, 1000, 1.0).is.first);
}

TEST(maximize_turns_the_gradient_around) {
  Sgd::Options options = kMomentum;
  CHECK_EQ(Sgd::fold(options, 1, 0.25).grad_scale, 0.25);
  options.maximize = 1.0;
  CHECK_EQ(Sgd::fold(options, 1, 0.25).grad_scale, -0.25);
}

// Otherwise an infinite parameter would become NaN.
TEST(no_decay_is_no_product_with_zero) {
  Sgd::Options options = kMomentum;
  options.weight_decay = 0.0;
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK_EQ((updated<Sgd, 1>(folded<Sgd>(options, 2), 1.0F, infinity, {1.0F}).param.x), infinity);
}

TEST(the_first_buffer_is_the_gradient_whatever_lay_there) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto after = updated<Sgd, 1>(folded<Sgd>(kMomentum, 1), 0.5F, 0.0F, {nan});
  CHECK_EQ(after.state[Sgd::kMomentumBuffer].x, 0.5F);
  CHECK_EQ(after.param.x, -0.1F * 0.5F);
}

// L2, the buffer, Nesterov's step ahead of it and the parameter are one each. Nothing else is fused.
TEST(every_fma_is_spelled_and_no_product_meets_a_sum) {
  forget_counts();
  updated<Sgd, 1>(folded<Sgd>(kMomentum, 3), 0.5F, 1.0F, {0.1F});
  CHECK_EQ(num_fma, 4);
  CHECK_EQ(num_products, 2);  // scale, momentum * buffer
  CHECK_EQ(num_sums, 0);
  Sgd::Options plain{0.1, 0.0, 0.0, 0.0, 0.0, 0.0};
  forget_counts();
  updated<Sgd, 0>(folded<Sgd>(plain, 3), 0.5F, 1.0F, {});
  CHECK_EQ(num_fma, 1);
  CHECK_EQ(num_products, 1);
  CHECK_EQ(num_sums, 0);
}

// torch's recipe written down a second time, and a variant without fma that must differ somewhere, or the numbers
// would prove nothing.
TEST(an_update_is_torchs_recipe_bit_for_bit) {
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  int64_t num_unfused_differ = 0;
  for (int i = 0; i < 20000; ++i) {
    Sgd::Options options = kMomentum;
    options.nesterov = i % 2 ? 1.0 : 0.0;
    options.dampening = i % 2 ? 0.0 : 0.3;
    options.weight_decay = i % 4 < 2 ? 1e-2 : 0.0;
    options.maximize = i % 8 < 4 ? 0.0 : 1.0;
    const int64_t count = 1 + i % 3;
    const float p = normal(random);
    const float b = normal(random);
    const float raw = normal(random);

    float g = raw * (options.maximize != 0.0 ? -0.75F : 0.75F);
    if (options.weight_decay != 0.0) g = std::fma(p, 1e-2F, g);
    const float plain = std::fma(g, -0.1F, p);
    const auto weight = static_cast<float>(1.0 - options.dampening);
    const float b1 = count == 1 ? g : std::fma(g, weight, b * 0.9F);
    const float d = options.nesterov != 0.0 ? std::fma(b1, 0.9F, g) : b1;
    const float p1 = std::fma(d, -0.1F, p);
    num_unfused_differ += p + d * -0.1F != p1;

    const auto after = updated<Sgd, 1>(folded<Sgd>(options, count, 0.75), raw, p, {b});
    CHECK_EQ(after.state[Sgd::kMomentumBuffer].x, b1);
    CHECK_EQ(after.param.x, p1);
    options.momentum = 0.0;
    CHECK_EQ((updated<Sgd, 0>(folded<Sgd>(options, count, 0.75), raw, p, {}).param.x), plain);
  }
  CHECK(num_unfused_differ > 1000);
}
