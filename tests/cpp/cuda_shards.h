// Shards, segment tables and orders of execution for the CUDA kernels that run on the host.
#pragma once

#include "cuda/device.cuh"
#include "cuda/kernels.h"
#include "elements.h"
#include "math/state.h"

namespace zx::testing {

inline constexpr cuda::Stream kHost{nullptr, 0};

// Segments one behind the other, `gap` elements of padding before each.
struct SegmentLayout {
  const char* name;
  std::vector<Segment> segments;
  int64_t numel;
};

inline SegmentLayout layout_of(const char* name, const std::vector<int64_t>& numels, int64_t gap, int64_t tail) {
  SegmentLayout layout{name, {}, 0};
  for (size_t i = 0; i < numels.size(); ++i) {
    layout.numel += gap;
    // Numbers and places of parameters as in shards of large models; in one the lower half of an index overflows.
    const auto param = static_cast<int64_t>(i * i + 7);
    const int64_t param_start = i % 3 == 0 ? 0 : (int64_t{1} << 32) - 256 * static_cast<int64_t>(i % 3);
    layout.segments.push_back({layout.numel, layout.numel + numels[i], 0, param, param_start});
    layout.numel += numels[i];
  }
  layout.numel += tail;
  return layout;
}

// Every kind of edge: none, one element, an empty segment, tails of each length, starts at any element, padding of no
// and of several tiles, more segments than a tile has elements, and one segment over many tiles.
inline std::vector<SegmentLayout> segment_layouts() {
  std::vector<int64_t> tails;
  for (int64_t numel = 0; numel <= 40; ++numel) tails.push_back(numel);
  std::vector<SegmentLayout> layouts{
      layout_of("nothing", {}, 0, 0),
      layout_of("padding only", {}, 0, 5000),
      layout_of("one element", {1}, 0, 0),
      layout_of("one element in padding", {1}, 777, 300),
      layout_of("empty segments", {0, 0, 5, 0, 300, 0}, 0, 0),
      layout_of("every tail", tails, 0, 0),
      layout_of("every tail, aligned starts", tails, 32, 16),
      layout_of("ones", std::vector<int64_t>(700, 1), 0, 0),
      layout_of("a tile and around it", {2048, 2047, 2049, 511, 513}, 0, 0),
      layout_of("blocks and around them", {256, 255, 257, 512, 1, 511}, 3, 1),
      layout_of("large", {20000}, 0, 480),
      layout_of("as a bucket is", {4096, 8192, 64, 64, 1000, 16}, 0, 256 * 53 - 13432),
      layout_of("large gaps", {300, 5, 4097}, 4000, 0),
  };
  return layouts;
}

// The same for 8-bit moments: segments start at multiples of a block, and the shard is a multiple of it.
inline SegmentLayout with_blocks(const SegmentLayout& layout) {
  SegmentLayout blocks{layout.name, layout.segments, 0};
  const auto align = [](int64_t element) { return (element + kStateBlock - 1) / kStateBlock * kStateBlock; };
  int64_t shift = 0;
  for (Segment& segment : blocks.segments) {
    shift += align(segment.start + shift) - (segment.start + shift);
    segment.start += shift;
    segment.stop += shift;
  }
  blocks.numel = align(layout.numel + shift);
  return blocks;
}

// Those that tell something of such moments, of a size that fibers get through in time.
inline std::vector<SegmentLayout> block_layouts() {
  std::vector<SegmentLayout> found;
  for (const SegmentLayout& layout : segment_layouts()) {
    if (layout.segments.size() <= 6) found.push_back(with_blocks(layout));
  }
  found.push_back(with_blocks(layout_of("tails", {0, 1, 7, 8, 9, 31, 249, 255}, 0, 0)));
  return found;
}

// Runs body under every order of threads and several numbers of blocks.
template <class Body>
void in_every_order(const Body& body) {
  using namespace zx::cuda::on_host;
  for (const Order tried : {Order::ascending, Order::descending, Order::shuffled}) {
    order = tried;
    for (const unsigned blocks : {1u, 3u}) {
      num_blocks = blocks;
      body();
    }
  }
  order = Order::ascending;
  num_blocks = 3;
}

}  // namespace zx::testing
