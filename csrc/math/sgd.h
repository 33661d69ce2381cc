// The SGD rule, with or without momentum, written once. Source: torch.optim.SGD with foreach=False (torch/optim/sgd.py,
// _single_tensor_sgd). On CPUs with AVX2, torch's add_(x, alpha=a) is a fused multiply-add, so each one is an fma here.
// Every fused multiply-add is spelled out and the build forbids contraction, so every device and instruction set gives
// the same bits.
#pragma once

#include <cstdint>

#include "math/macros.h"
#include "math/rule.h"

namespace zx {

struct Sgd {
  static constexpr const char* kName = "sgd";

  // The state of each element. It is kept if a param group has momentum.
  enum : int { kMomentumBuffer };
  static constexpr StateTraits kStates[] = {{.has_negatives = true, .takes_upper_bits = false}};
  static constexpr int kLeastStates = 0;

  // One row of the options table: the options of one param group, all in double, as Python holds them.
  struct Options {
    double lr;
    double momentum;
    double dampening;
    double weight_decay;  // L2: added to the gradient
    double nesterov;      // 0 or 1
    double maximize;      // 0 or 1
  };
  static ZX_HD int num_states(const Options& options) { return options.momentum != 0.0 ? 1 : 0; }
  // It counts the updates of the buffer. The first one differs from the others, and comes when a param group first has
  // momentum. If momentum is turned off and on again, the buffer goes on as it was, as torch's does.
  static ZX_HD bool counts_step(const Options& options) { return options.momentum != 0.0; }

  // The branches that an update takes.
  struct Cases {
    bool has_l2;
    bool first;
    bool nesterov;
  };
  // Constants folded per parameter and step; the element loop only reads them.
  template <class T>
  struct Step {
    T grad_scale;   // clip coefficient and inverse loss scale, negative to maximize
    T l2;           // gradient += l2 * parameter
    T momentum;     // buffer = momentum * buffer + grad_weight * gradient
    T grad_weight;  // 1 - dampening
    T neg_lr;
    Cases is;
  };

  static ZX_HD Step<double> fold(const Options& options, int64_t step, double grad_scale) {
    Step<double> folded{};
    folded.grad_scale = options.maximize != 0.0 ? -grad_scale : grad_scale;
    folded.l2 = options.weight_decay;
    folded.momentum = options.momentum;
    folded.grad_weight = 1.0 - options.dampening;
    folded.neg_lr = -options.lr;
    folded.is.has_l2 = options.weight_decay != 0.0;
    folded.is.first = step <= 1;
    folded.is.nesterov = options.nesterov != 0.0;
    return folded;
  }

  template <class T>
  static ZX_HD Step<T> narrow(const Step<double>& s) {
    Step<T> out;
    out.grad_scale = static_cast<T>(s.grad_scale);
    out.l2 = static_cast<T>(s.l2);
    out.momentum = static_cast<T>(s.momentum);
    out.grad_weight = static_cast<T>(s.grad_weight);
    out.neg_lr = static_cast<T>(s.neg_lr);
    out.is = {s.is.has_l2, s.is.first, s.is.nesterov};
    return out;
  }

  template <class V, int N>
  static ZX_HD void update(const Step<typename V::Scalar>& s, V grad, Lanes<V, N>& at) {
    grad = grad * V::splat(s.grad_scale);
    if (s.is.has_l2) grad = fma(at.param, V::splat(s.l2), grad);
    if constexpr (N > kMomentumBuffer) {
      V& buffer = at.state[kMomentumBuffer];
      const V next = fma(grad, V::splat(s.grad_weight), buffer * V::splat(s.momentum));
      // The first gradient becomes the buffer, undampened, whatever the buffer held. V(): see Adam::update_states().
      buffer = s.is.first ? V(grad) : V(next);
      const V ahead = fma(buffer, V::splat(s.momentum), grad);
      grad = s.is.nesterov ? V(ahead) : V(buffer);
    }
    at.param = fma(grad, V::splat(s.neg_lr), at.param);
  }

  static constexpr bool kHasUncheckedStep = false;
};

}  // namespace zx
