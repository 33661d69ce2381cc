// How the states of a rule are stored. A state is a number that the rule keeps for each element.
#pragma once

#include <cstdint>

namespace zx {

enum class StateKind : uint8_t {
  wide,       // in the dtype of the arithmetic: double beside f64 parameters, else float
  bf16,       // rounded stochastically, see float_to_bf16_stochastic()
  blockwise,  // 8 bits per element, see Note [8-bit states]
};

// How many elements share a scale. Blocks are counted from the parameter's start. In a shard with such states every
// segment starts at a multiple of this, so that blocks are whole or end with their parameter.
constexpr int64_t kStateBlock = 256;

struct StoredState {
  void* values;
  float* scales;  // one per block, StateKind::blockwise only
};

constexpr int kMostStates = 3;  // of any rule
struct StoredStates {
  StateKind kind;
  StoredState at[kMostStates];  // null after those that are kept
};

}  // namespace zx
