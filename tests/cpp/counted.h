// A lane for tests of a rule's math: a float that counts the operations asked of it.
#pragma once

#include <array>
#include <cmath>

#include "math/rule.h"
#include "math/scalar_lane.h"

namespace zx::testing {

inline int num_fma = 0;
inline int num_products = 0;
inline int num_sums = 0;
inline void forget_counts() { num_fma = num_products = num_sums = 0; }

struct Counted {
  using Scalar = float;
  float x;
  static Counted splat(float value) { return {value}; }
};
inline Counted operator+(Counted a, Counted b) { return ++num_sums, Counted{a.x + b.x}; }
inline Counted operator-(Counted a, Counted b) { return ++num_sums, Counted{a.x - b.x}; }
inline Counted operator*(Counted a, Counted b) { return ++num_products, Counted{a.x * b.x}; }
inline Counted operator/(Counted a, Counted b) { return {a.x / b.x}; }
inline Counted fma(Counted a, Counted b, Counted c) { return ++num_fma, Counted{std::fma(a.x, b.x, c.x)}; }
inline Counted sqrt(Counted a) { return {std::sqrt(a.x)}; }
inline Counted max(Counted a, Counted b) { return {a.x > b.x ? a.x : b.x}; }
inline Counted sign(Counted a) { return {sign(ScalarLane<float>{a.x}).x}; }

template <class Rule>
typename Rule::template Step<float> folded(const typename Rule::Options& options, int64_t step,
                                           double grad_scale = 1.0) {
  return Rule::template narrow<float>(Rule::fold(options, step, grad_scale));
}

template <class Rule, size_t N>
Lanes<Counted, static_cast<int>(N)> updated(const typename Rule::template Step<float>& step, float grad, float param,
                                            const std::array<float, N>& state) {
  Lanes<Counted, static_cast<int>(N)> at{{param}, {}};
  for (size_t i = 0; i < N; ++i) at.state[i] = {state[i]};
  Rule::update(step, Counted{grad}, at);
  return at;
}

}  // namespace zx::testing
