// Shards, segment tables and orders of execution for the CUDA kernels that run on the host.
#pragma once

#include "cuda/device.cuh"
#include "cuda/kernels.h"
#include "elements.h"

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
  for (const int64_t numel : numels) {
    layout.numel += gap;
    layout.segments.push_back({layout.numel, layout.numel + numel, 0});
    layout.numel += numel;
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
