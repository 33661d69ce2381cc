// Norm partials on the device: a warp takes a block of kNormBlock elements, a thread block keeps an exact sum.
// See Note [Norms are summed exactly].
#pragma once

#include <type_traits>

#include "cuda/device.cuh"
#include "cuda/find.cuh"
#include "cuda/pack.cuh"
#include "math/exact_sum.h"
#include "math/norm.h"
#include "math/scalar_lane.h"
#include "math/segment.h"

namespace zx::cuda {

constexpr int kLaneElements = kNormBlock / kWarp;

using Words = int64_t[kExactWords];

// ---- an exact sum of the whole thread block

__device__ __forceinline__ void atomic_add(int64_t* word, uint64_t value) {
  if (value != 0) atomicAdd(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
}
__device__ __forceinline__ void atomic_max(int64_t* word, int64_t value) {  // neither may be negative
  atomicMax(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
}

// All threads of the block call this before the first sum and that after the last.
__device__ __forceinline__ void clear_words(Words& words) {
  for (int i = threadIdx.x; i < kExactWords; i += kThreads) words[i] = 0;
  __syncthreads();
}
template <bool kMax = false>
__device__ __forceinline__ void give_words(const Words& words, int64_t* total) {
  __syncthreads();
  for (int i = threadIdx.x; i < kExactWords; i += kThreads) {
    if constexpr (kMax) {
      if (words[i] != 0) atomic_max(total + i, words[i]);
    } else {
      atomic_add(total + i, static_cast<uint64_t>(words[i]));
    }
  }
}

__device__ __forceinline__ void exact_add_shared(Words& words, double partial) {
  const ExactTerm term = exact_term(partial);
  for (int i = 0; i < 3; ++i) atomic_add(words + term.first + i, term.added[i]);
}

// ---- which blocks are a warp's

// Calls on_block(first, last, segment) for the norm blocks that start in [first, last) of a shard, and on_gap(first,
// last) for the padding there. `row`: where to look first, kept from range to range.
template <class OnBlock, class OnGap>
__device__ __forceinline__ void for_each_norm_block(const Segment* segments, int64_t num_segments, int64_t numel,
                                                    int64_t first, int64_t last, int64_t& row, const OnBlock& on_block,
                                                    const OnGap& on_gap) {
  row = first_ending_after(segments, row, num_segments, first);
  for (int64_t i = row;; ++i) {
    const int64_t gap_start = i > 0 ? segments[i - 1].stop : 0;
    const int64_t gap_stop = i < num_segments ? segments[i].start : numel;
    on_gap(gap_start > first ? gap_start : first, gap_stop < last ? gap_stop : last);
    if (i == num_segments || gap_stop >= last) return;
    const int64_t stop = segments[i].stop;
    int64_t block = gap_stop;
    if (block < first) block += (first - block + kNormBlock - 1) / kNormBlock * kNormBlock;
    for (; block < stop && block < last; block += kNormBlock) {
      on_block(block, block + kNormBlock < stop ? block + kNormBlock : stop, i);
    }
  }
}

// The same for all of a warp's share of a shard.
template <class OnBlock, class OnGap>
__device__ __forceinline__ void for_each_norm_block(const Segment* segments, int64_t num_segments, int64_t numel,
                                                    const OnBlock& on_block, const OnGap& on_gap) {
  constexpr int64_t kTile = int64_t{kWarps} * kNormBlock;
  const int64_t warp = threadIdx.x / kWarp;
  int64_t row = 0;
  const TileRange tiles = tiles_of_block(tiles_for(numel, kTile));
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    const int64_t first = tile * kTile + warp * kNormBlock;
    const int64_t last = first + kNormBlock < numel ? first + kNormBlock : numel;
    if (first < last) for_each_norm_block(segments, num_segments, numel, first, last, row, on_block, on_gap);
  }
}
constexpr int64_t norm_tiles(int64_t numel) { return tiles_for(numel, int64_t{kWarps} * kNormBlock); }

// ---- which elements of a block are a lane's

// A whole block that starts at a multiple of 16 bytes moves in full accesses, neighbours in neighbouring lanes.
template <class Stored>
struct LaneOrder {
  static constexpr int kEach = kAccessBytes / static_cast<int>(sizeof(Stored));
  static constexpr int kAccesses = kLaneElements / kEach;
  __device__ __forceinline__ static int first(int access) {
    return (access * kWarp + static_cast<int>(threadIdx.x) % kWarp) * kEach;
  }
};

// ---- the partial

template <class T>
using WarpTiles = T[kWarps][kNormBlock];

template <class T>
__device__ __forceinline__ bool is_finite(T x) {
  return x - x == T(0);
}

// Sums term(x) over this warp's tile, whose missing elements are 0, in the order of kNormAccumulators; the sum is on
// lane 0. Waits for what the lanes put into the tile, and until all have read it.
template <class T, class Term>
__device__ __forceinline__ double sum_of_tile(const T* tile, const Term& term) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  double sum = 0.0;
  __syncwarp();
  if (lane < kNormAccumulators) {
    for (int i = lane; i < kNormBlock; i += kNormAccumulators) sum += term(static_cast<double>(tile[i]));
  }
  __syncwarp();
  for (int half = kNormAccumulators / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(kAllLanes, sum, half, kNormAccumulators);
  }
  return sum;
}

__device__ __forceinline__ bool any_lane(bool condition) { return __any_sync(kAllLanes, condition) != 0; }

}  // namespace zx::cuda
