// Which elements of a shard belong to which parameter.
#pragma once

#include <cstdint>

namespace zx {

// A segment is one parameter's part of a shard. Segments are rows of an int64 table, in ascending order, with elements
// counted from the shard's start. The elements between segments are padding.
struct Segment {
  int64_t start;
  int64_t stop;
  int64_t options_row;
  int64_t param;        // the parameter's number, the same on all ranks: its position in the order of registration
  int64_t param_start;  // the segment's first element, counted from the parameter's start in the order of memory
};
constexpr int64_t kSegmentColumns = 5;
static_assert(sizeof(Segment) == kSegmentColumns * sizeof(int64_t));

}  // namespace zx
