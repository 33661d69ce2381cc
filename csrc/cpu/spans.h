// What every CPU op shares: the segment table, and its division into work for threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <vector>

#include "cpu/isa.h"
#include "math/norm.h"
#include "op_arguments.h"

namespace zx {

// The rows of a segment table, checked: in ascending order and inside the shard.
class SegmentTable {
 public:
  SegmentTable(const at::Tensor& table, int64_t shard_numel, const char* op);
  int64_t size() const { return size_; }
  const Segment& operator[](int64_t i) const { return rows_[i]; }

 private:
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
