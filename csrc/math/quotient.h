// A quotient by a number whose inverse is known, in less time than a division takes, with the same bits.
#pragma once

#include <limits>

#include "math/macros.h"

namespace zx {

// Note [A quotient by a known inverse]
// a / b, where `inverse` is 1 / b rounded. First the product q = a * inverse, then q + (a - bq) * inverse.
//
// Why this is the rounded quotient: let a and b be in [1, 2), and u = 2^-24. The inverse is off by up to u/2.
// - a < b: an ulp of the quotient is u, and q is off by less than (1 + a) / 2 ulp. Let m be a middle of two neighbours.
//   The quotient is never m itself, since bm has more bits than a. As a - bm is a multiple of u^2, the quotient is k *
//   u^2 / b away from m, with k at least 1. The sum, before it is rounded, is off by less than 3 u^2, so it can only be
//   on the wrong side of m if k < 6. Then q is half an ulp from m: it would be 1.5 ulp away for no b but 2 - 2u, with a
//   = 2 - 4u, whose quotient is not near a middle. So a - bq, at most bu/2 + k * u^2, has no more than 24 bits, and fma
//   computes it exactly. Times u/2 it is less than k * u^2 / b, since b <= 2 - 2u. The sum is on the right side.
// - a >= b: an ulp is 2u, q is off by less than one, and the same holds with distances twice as long.
// Powers of two change nothing, as long as ulp(a) * ulp(b) is not less than the least float, nor is q too large.
//
// If a is infinite, then a - bq is NaN: max() makes a number of it, and the sum is infinite. If a is NaN, it stays the
// same NaN. Only the sign of a zero is lost: -0 becomes 0.
template <class V>
ZX_HD V quotient_by_inverse(V a, V b, V inverse) {
  const V quotient = a * inverse;
  const V rest = fma(V::splat(-1) * b, quotient, a);
  return fma(max(rest, V::splat(std::numeric_limits<typename V::Scalar>::lowest())), inverse, quotient);
}

}  // namespace zx
