// The code that all CPU ops share: the segment table, and its division into work for threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ParallelGuard.h>

#include <vector>

#include "cpu/isa.h"
#include "math/norm.h"
#include "op_arguments.h"

namespace zx {

// The rows of a segment table, checked to be in ascending order and inside the shard.
class SegmentTable {
 public:
  SegmentTable(const at::Tensor& table, int64_t shard_numel, const char* op);
  int64_t size() const { return size_; }
  const Segment& operator[](int64_t i) const { return rows_[i]; }

 private:
  const Segment* rows_;
  int64_t size_;
};

// Elements of one segment that one thread handles. They start at a multiple of kNormBlock from the segment's start.
struct WorkUnit {
  int64_t segment;
  int64_t start;
  int64_t stop;
};

constexpr int64_t kMostInAUnit = 64 * kNormBlock;

std::vector<WorkUnit> split_into_units(const SegmentTable& segments);

// Without it at::parallel_for uses one thread, and does not say so.
#ifndef INTRA_OP_PARALLEL
#error "torch's threads are OpenMP's: compile with -fopenmp, as setup.py does"
#endif

// Runs body(first, last) over ranges of `count` units, which have `numel` elements in all. Each range has enough
// elements to be worth a thread. Under a ParallelGuard, which OpenMP does not know of, the caller's thread does
// everything.
template <class Body>
void parallel_units(int64_t count, int64_t numel, const Body& body) {
  constexpr int64_t kElementsWorthAThread = 32768;
  if (c10::ParallelGuard::is_enabled()) return body(int64_t{0}, count);
  at::parallel_for(0, count, 1 + count * kElementsWorthAThread / (numel + 1), body);
}

template <class Body>
void parallel_units(const std::vector<WorkUnit>& units, const Body& body) {
  if (units.empty()) return;
  int64_t numel = 0;
  for (const WorkUnit& unit : units) numel += unit.stop - unit.start;
  parallel_units(static_cast<int64_t>(units.size()), numel, body);
}

}  // namespace zx
