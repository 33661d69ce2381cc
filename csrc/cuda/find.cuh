// Finds the segment or piece that an element lies in. Tables may have any length, and are searched in registers.
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

// The row that an element lies in, or the gap around it. What is found for one element serves those beside it.
struct FoundRow {
  int64_t index = 0;  // for a gap, that of the row after it, which may be the table's end
  int64_t start = 0;
  int64_t stop = 0;
  bool is_gap = true;

  __device__ __forceinline__ bool has(int64_t i) const { return start <= i && i < stop; }

  // `rows` ascend, and do not overlap. After the last one there is a gap up to `numel`.
  template <class Row>
  __device__ __forceinline__ void find(const Row* rows, int64_t num_rows, int64_t numel, int64_t i) {
    index = first_ending_after(rows, int64_t{0}, num_rows, i);
    const int64_t next = index < num_rows ? rows[index].start : numel;
    is_gap = next > i;
    start = is_gap ? i : next;
    stop = is_gap ? next : rows[index].stop;
  }
};

}  // namespace zx::cuda
