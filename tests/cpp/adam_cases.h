// Every combination of dtypes and master that the update knows, and some options.
#pragma once

#include "elements.h"

namespace zx::testing {

struct AdamCase {
  DType param;
  Master master;
  DType grad;
  bool amsgrad;
};

inline std::vector<AdamCase> adam_cases() {
  std::vector<AdamCase> cases;
  for (const bool amsgrad : {false, true}) {
    for (const DType grad : kDTypes) {
      cases.push_back({DType::f64, Master::none, grad, amsgrad});
      if (grad == DType::f64) continue;
      cases.push_back({DType::f32, Master::none, grad, amsgrad});
      for (const DType half : {DType::bf16, DType::f16}) {
        cases.push_back({half, Master::none, grad, amsgrad});
        cases.push_back({half, Master::fp32, grad, amsgrad});
      }
      cases.push_back({DType::bf16, Master::remainder, grad, amsgrad});
    }
  }
  return cases;
}

inline std::string name_of(const AdamCase& c) {
  constexpr std::array masters{"none", "remainder", "fp32"};
  return joined(
      {name_of(c.param), masters[static_cast<size_t>(c.master)], name_of(c.grad), c.amsgrad ? "amsgrad" : ""});
}

inline DType state_dtype(const AdamCase& c) { return c.param == DType::f64 ? DType::f64 : DType::f32; }
inline DType master_dtype(const AdamCase& c) { return c.master == Master::remainder ? DType::bf16 : DType::f32; }

// Random parameters and masters. The master of every third element does not round to it, as if somebody had written
// into the parameter; all others do.
inline void make_masters(const AdamCase& c, int64_t numel, Elements& param, const Elements& master) {
  for (int64_t i = 0; c.master == Master::fp32 && i < numel; ++i) {
    if (i % 3 == 0) continue;
    const float exact = std::bit_cast<float>(static_cast<uint32_t>(master.get(i)));
    param.set(i, c.param == DType::bf16 ? float_to_bf16(exact).bits : float_to_f16(exact).bits);
  }
}

}  // namespace zx::testing
