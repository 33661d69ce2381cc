// The rule of torch.optim.SparseAdam for one element of a touched row: torch's operations in torch's order, each
// rounded to float by itself, so that bits are torch's. See torch/optim/_functional.py, sparse_adam. The root is left
// to the caller: on the CPU torch's sqrt rounds one value in six otherwise than the processor's.
#pragma once

#include <cmath>
#include <cstdint>

#include "math/macros.h"

namespace zx {

struct SparseAdam {
  float one_minus_beta1;
  float one_minus_beta2;
  float eps;
  float minus_step_size;

  // `step` counts this update too. In double until the end, as Python's numbers are in torch.
  static SparseAdam of(double lr, double beta1, double beta2, double eps, int64_t step) {
    const double correction1 = 1.0 - std::pow(beta1, static_cast<double>(step));
    const double correction2 = 1.0 - std::pow(beta2, static_cast<double>(step));
    const double step_size = lr * std::sqrt(correction2) / correction1;
    return {static_cast<float>(1.0 - beta1), static_cast<float>(1.0 - beta2), static_cast<float>(eps),
            static_cast<float>(-step_size)};
  }

  // The averages of the gradient and of its square.
  ZX_HD void advance(float grad, float& mean, float& square) const {
    mean += (grad - mean) * one_minus_beta1;
    square += (grad * grad - square) * one_minus_beta2;
  }

  // `root`: torch's of the square.
  ZX_HD float moved(float param, float mean, float root) const {
    return param + minus_step_size * (mean / (root + eps));
  }
};

}  // namespace zx
