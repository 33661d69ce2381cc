// The blocks that a norm's partials are taken over, and the kinds of norms. See Note [Norms are summed exactly] for how
// partials are added.
#pragma once

#include <cmath>
#include <cstdint>

#include "math/macros.h"

namespace zx {

constexpr int64_t kNormBlock = 256;  // elements in a partial, counted from each parameter's start

// Within a block, element i goes to accumulator i % 16 in ascending order, and the accumulators are folded in halves:
// this order is part of the result, on every device.
constexpr int kNormAccumulators = 16;

enum class Norm : uint8_t { sum_of_abs, sum_of_squares, max_of_abs, sum_of_powers };

// The kind of a norm of order p > 0.
ZX_HD Norm norm_of_order(double p) {
  if (p == 1.0) return Norm::sum_of_abs;
  if (p == 2.0) return Norm::sum_of_squares;
  return std::isinf(p) ? Norm::max_of_abs : Norm::sum_of_powers;
}

}  // namespace zx
