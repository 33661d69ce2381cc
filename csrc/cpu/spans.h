// What every CPU op shares: dtypes, the segment table, and its division into work for threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <vector>

#include "check.h"
#include "cpu/isa.h"

namespace zx {

inline bool has_dtype(at::ScalarType type) {
  return type == at::kDouble || type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

inline DType dtype_of(const at::Tensor& tensor, const char* op, const char* argument) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return DType::f64;
    case at::kFloat:
      return DType::f32;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    default:
      ZX_CHECK(false, op, argument, "must be float64, float32, bfloat16 or float16, got ", tensor.scalar_type());
  }
}

inline char* bytes_at(const at::Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.data_ptr()) + element * static_cast<int64_t>(tensor.element_size());
}

// An array that an op reaches through a bare pointer: flags, counts, words.
inline void check_array(const at::Tensor& tensor, at::ScalarType dtype, int64_t numel, const char* op,
                        const char* argument) {
  ZX_CHECK_DTYPE(tensor, dtype, op, argument);
  ZX_CHECK_NUMEL(tensor, numel, op, argument);
  ZX_CHECK_CONTIGUOUS(tensor, op, argument);
}

// A segment is one parameter's part of a shard: a row (start, stop, options row) of an int64 table; elements are
// counted from the shard's start.
constexpr int64_t kSegmentColumns = 3;
struct Segment {
  int64_t start;
  int64_t stop;
  int64_t options_row;
};

class SegmentTable {
 public:
  SegmentTable(const at::Tensor& table, int64_t shard_numel, const char* op);
  int64_t size() const { return size_; }
  const Segment& operator[](int64_t i) const { return rows_[i]; }

 private:
  static_assert(sizeof(Segment) == kSegmentColumns * sizeof(int64_t));
  const Segment* rows_;
  int64_t size_;
};

// A stretch of one segment that one thread handles; starts at a multiple of kNormBlock from the segment's start.
struct Stretch {
  int64_t segment;
  int64_t start;
  int64_t stop;
};

std::vector<Stretch> split_into_stretches(const SegmentTable& segments);

// Runs body(first, last) over ranges of stretches, with enough elements in each to be worth a thread.
template <class Body>
void parallel_stretches(const std::vector<Stretch>& stretches, const Body& body) {
  if (stretches.empty()) return;
  constexpr int64_t kElementsWorthAThread = 32768;
  int64_t numel = 0;
  for (const Stretch& stretch : stretches) numel += stretch.stop - stretch.start;
  const auto count = static_cast<int64_t>(stretches.size());
  const int64_t grain = 1 + count * kElementsWorthAThread / (numel + 1);
  at::parallel_for(0, count, grain, body);
}

}  // namespace zx
