// The dtypes that elements are stored in.
#pragma once

#include <cstdint>

namespace zx {

enum class DType : uint8_t { f64, f32, bf16, f16 };

constexpr int64_t width_of(DType dtype) {
  constexpr int64_t kBytes[] = {8, 4, 2, 2};
  return kBytes[static_cast<int>(dtype)];
}

// How the exact value of a parameter is kept.
enum class Master : uint8_t {
  none,       // the parameter itself
  remainder,  // bf16 parameter + 16 bits: see Note [A master as bf16 parameter plus remainder]
  fp32,       // a float beside a 16-bit parameter
};

}  // namespace zx
