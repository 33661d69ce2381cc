// The Lion rule, written once. Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023),
// algorithm 2. The fused multiply-adds are where torch's add_(x, alpha=a) has them. Every one is spelled out and the
// build forbids contraction, so every device and instruction set gives the same bits.
#pragma once

#include <cstdint>

#include "math/macros.h"
#include "math/rule.h"

namespace zx {

struct Lion {
  static constexpr const char* kName = "lion";

  // The state of each element.
  enum : int { kExpAvg };
  static constexpr StateTraits kStates[] = {{.has_negatives = true, .takes_upper_bits = false}};
  static constexpr int kLeastStates = 1;

  // One row of the options table: the options of one param group, all in double, as Python holds them.
  struct Options {
    double lr;
    double beta1;  // of the average whose sign is the update
    double beta2;  // of the average that is kept
    double weight_decay;
    double maximize;  // 0 or 1
  };
  static ZX_HD int num_states(const Options& /*options*/) { return 1; }
  static ZX_HD bool counts_step(const Options& /*options*/) { return true; }

  // Constants folded per parameter and step; the element loop only reads them.
  template <class T>
  struct Step {
    T grad_scale;  // clip coefficient and inverse loss scale, negative to maximize
    T decay;       // parameter *= decay
    T beta1;
    T grad_weight1;  // 1 - beta1
    T beta2;
    T grad_weight2;  // 1 - beta2
    T neg_lr;
  };

  static ZX_HD Step<double> fold(const Options& options, int64_t /*step*/, double grad_scale) {
    Step<double> folded{};
    folded.grad_scale = options.maximize != 0.0 ? -grad_scale : grad_scale;
    folded.decay = 1.0 - options.lr * options.weight_decay;
    folded.beta1 = options.beta1;
    folded.grad_weight1 = 1.0 - options.beta1;
    folded.beta2 = options.beta2;
    folded.grad_weight2 = 1.0 - options.beta2;
    folded.neg_lr = -options.lr;
    return folded;
  }

  template <class T>
  static ZX_HD Step<T> narrow(const Step<double>& s) {
    Step<T> out;
    out.grad_scale = static_cast<T>(s.grad_scale);
    out.decay = static_cast<T>(s.decay);
    out.beta1 = static_cast<T>(s.beta1);
    out.grad_weight1 = static_cast<T>(s.grad_weight1);
    out.beta2 = static_cast<T>(s.beta2);
    out.grad_weight2 = static_cast<T>(s.grad_weight2);
    out.neg_lr = static_cast<T>(s.neg_lr);
    return out;
  }

  template <class V, int N>
  static ZX_HD void update(const Step<typename V::Scalar>& s, V grad, Lanes<V, N>& at) {
    V& momentum = at.state[kExpAvg];
    grad = grad * V::splat(s.grad_scale);
    const V average = fma(grad, V::splat(s.grad_weight1), momentum * V::splat(s.beta1));
    momentum = fma(grad, V::splat(s.grad_weight2), momentum * V::splat(s.beta2));
    at.param = fma(sign(average), V::splat(s.neg_lr), at.param * V::splat(s.decay));
  }

  static constexpr bool kHasUncheckedStep = false;
};

}  // namespace zx
