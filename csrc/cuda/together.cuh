// Several shards as the work of one launch: if they are small, a launch for each would take longer than its elements.
#pragma once

#include "cuda/device.cuh"

namespace zx::cuda {

// A kernel's arguments for each shard. All are in the launch's own parameters, so nothing is uploaded.
template <class Args>
struct Together {
  int count = 0;
  int64_t first_tile[kMostTogether + 1] = {};  // of each shard among all tiles; after the last, the number of tiles
  Args shards[kMostTogether] = {};

  void add(const Args& shard, int64_t num_tiles) {
    shards[count] = shard;
    first_tile[count + 1] = first_tile[count] + num_tiles;
    ++count;
  }
  int64_t num_tiles() const { return first_tile[count]; }
};
// On every architecture a kernel may have this many bytes of parameters.
template <class Args>
constexpr bool kFitsALaunch = sizeof(Together<Args>) <= 4096;

// Calls work(shard, tiles) for each shard that this block has tiles in.
template <class Args, class Work>
__device__ __forceinline__ void for_each_shard(const Together<Args>& all, const Work& work) {
  const TileRange tiles = tiles_of_block(all.first_tile[all.count]);
  for (int i = 0; i < all.count; ++i) {
    const int64_t start = all.first_tile[i];
    const int64_t first = tiles.first > start ? tiles.first : start;
    const int64_t last = tiles.last < all.first_tile[i + 1] ? tiles.last : all.first_tile[i + 1];
    if (first < last) work(all.shards[i], TileRange{first - start, last - start});
  }
}

}  // namespace zx::cuda
