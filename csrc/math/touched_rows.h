// The rows of a table that a step touches, for the updates of both devices.
#pragma once

#include <cstdint>

#include "math/dtype.h"
#include "math/state.h"

namespace zx {

// Row rows[i] of the table has its master and its states at place places[i] of theirs, and its gradient is number i. No
// row comes twice.
struct TouchedRows {
  int64_t count;
  int64_t width;
  const int64_t* rows;
  const int64_t* places;
  const float* grads;
  DType dtype;  // of the values: not f64
  void* values;
  Master master_kind;
  void* master;                     // null if none is kept
  float* states[kMostStates] = {};  // as many as the rule keeps

  int64_t row_bytes() const { return width * width_of(dtype); }
  char* value(int64_t i) const { return static_cast<char*>(values) + rows[i] * row_bytes(); }
  void* master_of(int64_t i) const {
    const int64_t bytes = master_kind == Master::fp32 ? 4 : 2;
    return master == nullptr ? nullptr : static_cast<char*>(master) + places[i] * width * bytes;
  }
};

}  // namespace zx
