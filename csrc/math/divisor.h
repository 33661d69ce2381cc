// What a sum of gradients is divided by.
#pragma once

#include <cmath>

namespace zx {

// Whether a product with the inverse has the bits of the quotient, for less: for powers of two.
inline bool has_exact_inverse(double divisor) {
  int exponent = 0;
  return std::frexp(divisor, &exponent) == 0.5;
}

}  // namespace zx
