#include "cpu/spans.h"

#include <algorithm>

namespace zx {

SegmentTable::SegmentTable(const at::Tensor& table, int64_t shard_numel, const char* op) {
  rows_ = reinterpret_cast<const Segment*>(table.const_data_ptr<int64_t>());
  size_ = table.size(0);
  int64_t end = 0;
  for (int64_t i = 0; i < size_; ++i) {
    ZX_CHECK(rows_[i].start >= end && rows_[i].stop >= rows_[i].start && rows_[i].stop <= shard_numel, op, "segments",
             "row ", i, " is [", rows_[i].start, ", ", rows_[i].stop, "), which does not lie in [", end, ", ",
             shard_numel, ")");
    end = rows_[i].stop;
  }
}

std::vector<WorkUnit> split_into_units(const SegmentTable& segments) {
  std::vector<WorkUnit> units;
  units.reserve(static_cast<size_t>(segments.size()));
  for (int64_t i = 0; i < segments.size(); ++i) {
    for (int64_t start = segments[i].start; start < segments[i].stop; start += kMostInAUnit) {
      units.push_back({i, start, std::min(start + kMostInAUnit, segments[i].stop)});
    }
  }
  return units;
}

}  // namespace zx
