// Which segment or piece an element lies in: tables of any length, searched in registers.
#pragma once

#include <cstdint>

namespace zx::cuda {

// The first row in [low, high) of an ascending table with stop > element, else high.
template <class Row>
__device__ __forceinline__ int64_t first_ending_after(const Row* rows, int64_t low, int64_t high, int64_t element) {
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (rows[middle].stop > element) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace zx::cuda
