// The Adam / AdamW rule, written once. Source: torch.optim.AdamW with foreach=False (torch/optim/adam.py,
// _single_tensor_adam), including the two forms of its lerp. Every fused multiply-add is spelled out and the build
// forbids contraction, so every device and instruction set gives the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "math/macros.h"
#include "math/quotient.h"
#include "math/rule.h"

namespace zx {

// A double, and what its rounding lost.
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

// Computes base^exponent by squaring: device and host `pow` differ in their last bits, but products and fma do not.
// Plain products would accumulate an error of up to `exponent` ulp, and 1 - base^exponent magnifies it: fp64 parameters
// would show it.
ZX_HD double integer_power(double base, int64_t exponent) {
  Compensated result{1.0, 0.0};
  for (Compensated square{base, 0.0}; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result.high;
}

struct Adam {
  static constexpr const char* kName = "adam";

  // The states of each element. The last one is kept only if a param group asks for amsgrad. It is rounded with the
  // bits of the one before it, so that it stays at least as large.
  enum : int { kExpAvg, kExpAvgSq, kMaxExpAvgSq };
  static constexpr StateTraits kStates[] = {
      {.has_negatives = true, .takes_upper_bits = false},
      {.has_negatives = false, .takes_upper_bits = true},
      {.has_negatives = false, .takes_upper_bits = true},
  };
  static constexpr int kLeastStates = 2;

  // One row of the options table: the options of one param group, all in double, as Python holds them.
  struct Options {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    double maximize;   // 0 or 1
    double decoupled;  // 1: AdamW, decay multiplies the parameter; 0: Adam, decay is added to the gradient (L2)
    double amsgrad;    // 0 or 1
  };
  static ZX_HD int num_states(const Options& options) { return options.amsgrad != 0.0 ? 3 : 2; }
  static ZX_HD bool counts_step(const Options& /*options*/) { return true; }

  // The branches that an update takes.
  struct Cases {
    bool lerp_from_grad;
    bool has_l2;
    bool ordinary;  // narrow() sets it: new_param_unchecked() and new_param_by_inverse() can take these constants
  };
  // Constants folded per parameter and step; the element loop only reads them.
  template <class T>
  struct Step {
    T grad_scale;      // clip coefficient and inverse loss scale, negative to maximize
    T decay;           // parameter *= decay
    T l2;              // gradient += l2 * parameter
    T lerp_weight;     // exp_avg = lerp_weight * (grad - exp_avg) + (is.lerp_from_grad ? grad : exp_avg)
    T beta2;           // exp_avg_sq = beta2 * exp_avg_sq + grad_sq_weight * grad^2
    T grad_sq_weight;  // 1 - beta2
    T bias_correction2_sqrt;
    T eps;
    T neg_step_size;                  // -lr / (1 - beta1^step)
    T inverse_bias_correction2_sqrt;  // narrow() sets it, for those two
    Cases is;
  };

  static ZX_HD Step<double> fold(const Options& options, int64_t step, double grad_scale) {
    const double bias_correction1 = 1.0 - integer_power(options.beta1, step);
    const double bias_correction2 = 1.0 - integer_power(options.beta2, step);
    const double weight1 = 1.0 - options.beta1;
    const bool near_grad = weight1 >= 0.5;  // torch's lerp starts from the nearer end
    const bool decoupled = options.decoupled != 0.0;
    Step<double> folded{};
    folded.grad_scale = options.maximize != 0.0 ? -grad_scale : grad_scale;
    folded.decay = decoupled ? 1.0 - options.lr * options.weight_decay : 1.0;
    folded.l2 = decoupled ? 0.0 : options.weight_decay;
    folded.lerp_weight = weight1;
    folded.beta2 = options.beta2;
    folded.grad_sq_weight = 1.0 - options.beta2;
    folded.bias_correction2_sqrt = std::sqrt(bias_correction2);
    folded.eps = options.eps;
    folded.neg_step_size = -(options.lr / bias_correction1);
    folded.is.lerp_from_grad = near_grad;
    folded.is.has_l2 = folded.l2 != 0.0;
    return folded;
  }

  template <class T>
  static ZX_HD Step<T> narrow(const Step<double>& s) {
    Step<T> out;
    out.grad_scale = static_cast<T>(s.grad_scale);
    out.decay = static_cast<T>(s.decay);
    out.l2 = static_cast<T>(s.l2);
    // The weight is narrowed before 1 is taken from it, as torch's kernel does.
    out.lerp_weight = s.is.lerp_from_grad ? static_cast<T>(s.lerp_weight) - T(1) : static_cast<T>(s.lerp_weight);
    out.beta2 = static_cast<T>(s.beta2);
    out.grad_sq_weight = static_cast<T>(s.grad_sq_weight);
    out.bias_correction2_sqrt = static_cast<T>(s.bias_correction2_sqrt);
    out.eps = static_cast<T>(s.eps);
    out.neg_step_size = static_cast<T>(s.neg_step_size);
    out.inverse_bias_correction2_sqrt = T(1) / out.bias_correction2_sqrt;
    out.is.lerp_from_grad = s.is.lerp_from_grad;
    out.is.has_l2 = s.is.has_l2;
    out.is.ordinary =
        out.bias_correction2_sqrt >= T(0x1p-20) && out.bias_correction2_sqrt <= T(1) && out.eps <= T(0x1p+20);
    return out;
  }

  template <class V, int N>
  static ZX_HD void update(const Step<typename V::Scalar>& s, V grad, Lanes<V, N>& at) {
    update_states(s, grad, at);
    at.param = new_param(s, at);
  }

  // Does all of the update except its last step: afterwards the states are new, and the parameter has decayed.
  template <class V, int N>
  static ZX_HD void update_states(const Step<typename V::Scalar>& s, V grad, Lanes<V, N>& at) {
    V& exp_avg = at.state[kExpAvg];
    V& exp_avg_sq = at.state[kExpAvgSq];
    grad = grad * V::splat(s.grad_scale);
    if (s.is.has_l2) grad = fma(at.param, V::splat(s.l2), grad);
    at.param = at.param * V::splat(s.decay);
    // V() makes this a choice between values. Given variables, GCC chooses between their addresses, and keeps all
    // vectors in memory for that.
    const V from = s.is.lerp_from_grad ? V(grad) : V(exp_avg);
    exp_avg = fma(V::splat(s.lerp_weight), grad - exp_avg, from);
    exp_avg_sq = fma(V::splat(s.grad_sq_weight) * grad, grad, exp_avg_sq * V::splat(s.beta2));
    if constexpr (N > kMaxExpAvgSq) at.state[kMaxExpAvgSq] = max(at.state[kMaxExpAvgSq], exp_avg_sq);
  }

  // The last step, after update_states().
  template <class V, int N>
  static ZX_HD V new_param(const Step<typename V::Scalar>& s, const Lanes<V, N>& at) {
    const V denom = sqrt(second_moment(at)) / V::splat(s.bias_correction2_sqrt) + V::splat(s.eps);
    return at.param + (V::splat(s.neg_step_size) * at.state[kExpAvg]) / denom;
  }

  // The same bits with one division, if s.is.ordinary. See Note [A quotient by a known inverse].
  template <class V, int N>
  static ZX_HD V new_param_by_inverse(const Step<typename V::Scalar>& s, const Lanes<V, N>& at) {
    const V root = quotient_by_inverse(sqrt(second_moment(at)), V::splat(s.bias_correction2_sqrt),
                                       V::splat(s.inverse_bias_correction2_sqrt));
    return at.param + (V::splat(s.neg_step_size) * at.state[kExpAvg]) / (root + V::splat(s.eps));
  }

  // The one whose root is the denominator.
  template <class V, int N>
  static ZX_HD V second_moment(const Lanes<V, N>& at) {
    return at.state[N > kMaxExpAvgSq ? kMaxExpAvgSq : kExpAvgSq];
  }

  // ---- The last step, with a root and quotients that are right for ordinary operands only
  static constexpr bool kHasUncheckedStep = true;

  struct Operands {
    float radicand;
    float numerator;
  };
  template <class V, int N>
  static ZX_HD Operands operands(const Step<float>& s, const Lanes<V, N>& at) {
    return {second_moment(at).x, s.neg_step_size * at.state[kExpAvg].x};
  }

  // The bounds of ordinary operands. With narrow()'s bounds on constants they keep the root in [2^-50, 2^20], the
  // denominator in [2^-50, 2^41], and the last quotient in [2^-125, 2^110].
  static constexpr float kLeastRadicand = 0x1p-100f;
  static constexpr float kMostRadicand = 0x1p+40f;
  static constexpr float kLeastNumerator = 0x1p-84f;
  static constexpr float kMostNumerator = 0x1p+60f;

  // Whether the last quotient is a zero over a denominator that is eps; then it is the numerator, with its sign.
  static ZX_HD bool rests(const Step<float>& s, const Operands& of) {
    return of.radicand == 0.0f && of.numerator == 0.0f && s.eps > 0.0f;
  }
  static ZX_HD float new_param_at_rest(float param, const Operands& of) { return param + of.numerator; }

  // Computes new_param() if s.is.ordinary and the operands are ordinary.
  ZX_FOR_ANY_BODY
  template <class Unchecked>
  static ZX_HD float new_param_unchecked(const Step<float>& s, float param, const Operands& of) {
    const float root =
        Unchecked::quotient(Unchecked::sqrt(of.radicand), s.bias_correction2_sqrt, s.inverse_bias_correction2_sqrt);
    return param + Unchecked::quotient(of.numerator, root + s.eps);
  }
};

}  // namespace zx
