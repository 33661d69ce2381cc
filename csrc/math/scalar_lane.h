// One element as the update's V (see math/rule.h). A CUDA lane, a SIMD tail and the plain CPU loop compute with it.
#pragma once

#include <cmath>
#include <cstdint>

#include "math/macros.h"
#include "math/rounding.h"

namespace zx {

template <class T>
struct ScalarLane {
  using Scalar = T;
  static constexpr int kLanes = 1;
  T x;

  static ZX_HD ScalarLane splat(T value) { return {value}; }
  static ZX_HD ScalarLane load(const double* p) { return {static_cast<T>(*p)}; }
  static ZX_HD ScalarLane load(const float* p) { return {static_cast<T>(*p)}; }
  static ZX_HD ScalarLane load(const bf16* p) { return {static_cast<T>(bf16_to_float(*p))}; }
  static ZX_HD ScalarLane load(const f16* p) { return {static_cast<T>(f16_operand(*p))}; }
  ZX_HD void store(double* p) const { *p = static_cast<double>(x); }
  ZX_HD void store(float* p) const { *p = static_cast<float>(x); }
  ZX_HD void store(bf16* p) const { *p = float_to_bf16(static_cast<float>(x)); }
  ZX_HD void store(f16* p) const { *p = float_to_f16(static_cast<float>(x)); }

  static ZX_HD ScalarLane load_split(const bf16* param, const int16_t* remainder) {
    return {join_master(*param, *remainder)};
  }
  ZX_HD void store_split(bf16* param, int16_t* remainder) const {
    const SplitMaster split = split_master(x);
    *param = split.param;
    *remainder = split.remainder;
  }
  // Loads the master if it still rounds to the parameter; if not, a new value was written into the parameter, and is
  // loaded.
  template <class H>
  static ZX_HD ScalarLane load_master(const H* param, const float* master) {
    H rounded;
    ScalarLane{*master}.store(&rounded);
    return rounded.bits == param->bits ? ScalarLane{*master} : load(param);
  }
};
template <class T>
ZX_HD ScalarLane<T> operator+(ScalarLane<T> a, ScalarLane<T> b) {
  return {a.x + b.x};
}
template <class T>
ZX_HD ScalarLane<T> operator-(ScalarLane<T> a, ScalarLane<T> b) {
  return {a.x - b.x};
}
template <class T>
ZX_HD ScalarLane<T> operator*(ScalarLane<T> a, ScalarLane<T> b) {
  return {a.x * b.x};
}
template <class T>
ZX_HD ScalarLane<T> operator/(ScalarLane<T> a, ScalarLane<T> b) {
  return {a.x / b.x};
}
template <class T>
ZX_HD ScalarLane<T> fma(ScalarLane<T> a, ScalarLane<T> b, ScalarLane<T> c) {
  return {std::fma(a.x, b.x, c.x)};
}
template <class T>
ZX_HD ScalarLane<T> sqrt(ScalarLane<T> a) {
  return {std::sqrt(a.x)};
}
template <class T>
ZX_HD ScalarLane<T> max(ScalarLane<T> a, ScalarLane<T> b) {
  return {a.x > b.x ? a.x : b.x};
}
// 1 or -1, 0 for either zero, and NaN for NaN (of which torch.sign makes 0).
template <class T>
ZX_HD ScalarLane<T> sign(ScalarLane<T> a) {
  return {std::fabs(a.x) > T(0) ? std::copysign(T(1), a.x) : a.x + T(0)};
}

}  // namespace zx
