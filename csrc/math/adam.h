// The Adam / AdamW rule, written once. Source: torch.optim.AdamW with foreach=False (torch/optim/adam.py,
// _single_tensor_adam), including the two forms of its lerp. Every fused multiply-add is spelled out and the build
// forbids contraction, so every device and instruction set gives the same bits.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "math/macros.h"

namespace zx {

// One row of the options table: what a param group says. All in double, as Python holds them.
struct AdamOptions {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double maximize;   // 0 or 1
  double decoupled;  // 1: AdamW, decay multiplies the parameter; 0: Adam, decay is added to the gradient (L2)
  double amsgrad;    // 0 or 1
};
constexpr int64_t kAdamOptionsColumns = 8;
constexpr size_t kAdamMoments = 2;  // without the third of amsgrad

// Constants folded per parameter and step; the element loop only reads them.
template <class T>
struct AdamStep {
  T grad_scale;      // clip coefficient and inverse loss scale, negative to maximize
  T decay;           // parameter *= decay
  T l2;              // gradient += l2 * parameter
  T lerp_weight;     // exp_avg = lerp_weight * (grad - exp_avg) + (lerp_from_grad ? grad : exp_avg)
  T beta2;           // exp_avg_sq = beta2 * exp_avg_sq + grad_sq_weight * grad^2
  T grad_sq_weight;  // 1 - beta2
  T bias_correction2_sqrt;
  T eps;
  T neg_step_size;  // -lr / (1 - beta1^step)
  bool lerp_from_grad;
  bool has_l2;
};

// A double and what rounding it lost.
struct Compensated {
  double high;
  double low;
};

ZX_HD Compensated multiply(Compensated a, Compensated b) {
  const double product = a.high * b.high;
  const double lost = std::fma(a.high, b.high, -product) + (a.high * b.low + a.low * b.high);
  const double high = product + lost;
  return {high, lost - (high - product)};
}

// base^exponent by squaring: device and host `pow` differ in their last bits, products and fma don't. Plain products
// would gather up to `exponent` ulp, and 1 - base^exponent magnifies them: fp64 parameters would show it.
ZX_HD double integer_power(double base, int64_t exponent) {
  Compensated result{1.0, 0.0};
  for (Compensated square{base, 0.0}; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result.high;
}

ZX_HD AdamStep<double> fold_adam(const AdamOptions& options, int64_t step, double grad_scale) {
  const double bias_correction1 = 1.0 - integer_power(options.beta1, step);
  const double bias_correction2 = 1.0 - integer_power(options.beta2, step);
  const double weight1 = 1.0 - options.beta1;
  const bool near_grad = weight1 >= 0.5;  // torch's lerp starts from the nearer end
  const bool decoupled = options.decoupled != 0.0;
  AdamStep<double> folded;
  folded.grad_scale = options.maximize != 0.0 ? -grad_scale : grad_scale;
  folded.decay = decoupled ? 1.0 - options.lr * options.weight_decay : 1.0;
  folded.l2 = decoupled ? 0.0 : options.weight_decay;
  folded.lerp_weight = weight1;
  folded.beta2 = options.beta2;
  folded.grad_sq_weight = 1.0 - options.beta2;
  folded.bias_correction2_sqrt = std::sqrt(bias_correction2);
  folded.eps = options.eps;
  folded.neg_step_size = -(options.lr / bias_correction1);
  folded.lerp_from_grad = near_grad;
  folded.has_l2 = folded.l2 != 0.0;
  return folded;
}

template <class T>
ZX_HD AdamStep<T> narrow(const AdamStep<double>& s) {
  AdamStep<T> out;
  out.grad_scale = static_cast<T>(s.grad_scale);
  out.decay = static_cast<T>(s.decay);
  out.l2 = static_cast<T>(s.l2);
  // The weight is narrowed before 1 is taken from it, as torch's kernel does.
  out.lerp_weight = s.lerp_from_grad ? static_cast<T>(s.lerp_weight) - T(1) : static_cast<T>(s.lerp_weight);
  out.beta2 = static_cast<T>(s.beta2);
  out.grad_sq_weight = static_cast<T>(s.grad_sq_weight);
  out.bias_correction2_sqrt = static_cast<T>(s.bias_correction2_sqrt);
  out.eps = static_cast<T>(s.eps);
  out.neg_step_size = static_cast<T>(s.neg_step_size);
  out.lerp_from_grad = s.lerp_from_grad;
  out.has_l2 = s.has_l2;
  return out;
}

// The state of V::kLanes elements. V is a vector or a scalar lane of float or double with the operators
// + - * /, and the functions fma, sqrt, max and V::splat.
template <class V>
struct AdamLanes {
  V param;
  V exp_avg;
  V exp_avg_sq;
  V max_exp_avg_sq;
};

// All of the update but its last step: moments are new, and the parameter has decayed.
template <bool kAmsgrad, class V>
ZX_HD void adam_moments(const AdamStep<typename V::Scalar>& s, V grad, AdamLanes<V>& at) {
  grad = grad * V::splat(s.grad_scale);
  if (s.has_l2) grad = fma(at.param, V::splat(s.l2), grad);
  at.param = at.param * V::splat(s.decay);
  // V(): a choice of values. Of variables GCC chooses the address, and keeps all vectors in memory for it.
  const V from = s.lerp_from_grad ? V(grad) : V(at.exp_avg);
  at.exp_avg = fma(V::splat(s.lerp_weight), grad - at.exp_avg, from);
  at.exp_avg_sq = fma(V::splat(s.grad_sq_weight) * grad, grad, at.exp_avg_sq * V::splat(s.beta2));
  if constexpr (kAmsgrad) at.max_exp_avg_sq = max(at.max_exp_avg_sq, at.exp_avg_sq);
}

// The second moment that divides.
template <bool kAmsgrad, class V>
ZX_HD V adam_second(const AdamLanes<V>& at) {
  if constexpr (kAmsgrad) return at.max_exp_avg_sq;
  return at.exp_avg_sq;
}

// The last step, after adam_moments().
template <bool kAmsgrad, class V>
ZX_HD V adam_param(const AdamStep<typename V::Scalar>& s, const AdamLanes<V>& at) {
  const V denom = sqrt(adam_second<kAmsgrad>(at)) / V::splat(s.bias_correction2_sqrt) + V::splat(s.eps);
  return at.param + (V::splat(s.neg_step_size) * at.exp_avg) / denom;
}

template <bool kAmsgrad, class V>
ZX_HD void adam_update(const AdamStep<typename V::Scalar>& s, V grad, AdamLanes<V>& at) {
  adam_moments<kAmsgrad>(s, grad, at);
  at.param = adam_param<kAmsgrad>(s, at);
}

}  // namespace zx
