// How moments are stored.
#pragma once

#include <cstdint>

namespace zx {

enum class StateKind : uint8_t {
  wide,       // as they are computed: double beside f64 parameters, else float
  bf16,       // rounded stochastically, see float_to_bf16_stochastic
  blockwise,  // 8 bits an element, see Note [8-bit moments]
};

// Elements that share a scale, counted from the parameter's start. In a shard with such moments every segment starts at
// a multiple of this, so that blocks are whole or end with their parameter.
constexpr int64_t kMomentBlock = 256;

struct Moment {
  void* values;
  float* scales;  // one a block, StateKind::blockwise only
};
struct Moments {
  StateKind kind;
  Moment exp_avg;
  Moment exp_avg_sq;
  Moment max_exp_avg_sq;  // null where there is no amsgrad
};

}  // namespace zx
