// Norm partials on the device: a warp takes two blocks of kNormBlock elements, a thread block keeps an exact sum.
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

using Words = int64_t[kExactLimbs];

// ---- an exact sum of the whole thread block

__device__ __forceinline__ void atomic_add(int64_t* word, uint64_t value) {
  if (value != 0) atomicAdd(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
}
__device__ __forceinline__ void atomic_max(int64_t* word, int64_t value) {  // neither may be negative
  atomicMax(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
}

// All threads of the block call clear_words() before the first sum, and give_words() after the last.
__device__ __forceinline__ void clear_words(Words& limbs) {
  for (int i = threadIdx.x; i < kExactLimbs; i += kThreads) limbs[i] = 0;
  __syncthreads();
}
template <bool kMax = false>
__device__ __forceinline__ void give_words(const Words& limbs, int64_t* total) {
  __syncthreads();
  for (int i = threadIdx.x; i < kExactLimbs; i += kThreads) {
    if constexpr (kMax) {
      if (limbs[i] != 0) atomic_max(total + i, limbs[i]);
    } else {
      atomic_add(total + i, static_cast<uint64_t>(limbs[i]));
    }
  }
}

// One lane's sum, until its place in the limbs changes: atomics on 64 bits of shared memory are loops.
class LaneSum {
 public:
  __device__ __forceinline__ void add(Words& limbs, double partial) {
    const ExactTerm term = exact_term(partial);
    if (term.first != first_) give(limbs);
    first_ = term.first;
    ZX_UNROLL
    for (int i = 0; i < 3; ++i) added_[i] += term.added[i];
  }
  __device__ __forceinline__ void give(Words& limbs) {
    ZX_UNROLL
    for (int i = 0; i < 3; ++i) {
      atomic_add(limbs + first_ + i, added_[i]);
      added_[i] = 0;
    }
  }

 private:
  int first_ = 0;
  uint64_t added_[3] = {0, 0, 0};  // sums of digits below 2^32: up to 2^32 partials fit
};

// ---- the blocks of a warp

// A warp takes two norm blocks at a time: each half of its lanes sums one, and twice as much memory is on its way.
constexpr int kPair = 2;
constexpr int64_t kPairNumel = kPair * kNormBlock;
static_assert(kPair * kNormAccumulators == kWarp);

// Calls on_pair(first, stop, row) for one or two neighbouring norm blocks of a segment that start in this warp's share
// of a shard, and on_gap(first, stop) for the padding there.
template <class OnPair, class OnGap>
__device__ __forceinline__ void for_each_norm_pair(const Segment* segments, int64_t num_segments, int64_t numel,
                                                   const OnPair& on_pair, const OnGap& on_gap) {
  constexpr int64_t kTile = int64_t{kWarps} * kPairNumel;
  const int64_t in_tile = int64_t{threadIdx.x / kWarp} * kPairNumel;
  FoundRow row;
  const TileRange tiles = tiles_of_block(tiles_for(numel, kTile));
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    const int64_t first = tile * kTile + in_tile;
    const int64_t last = first + kPairNumel < numel ? first + kPairNumel : numel;
    for (int64_t at = first; at < last;) {
      if (!row.has(at)) row.find(segments, num_segments, numel, at);
      int64_t stop = row.stop;
      if (row.is_gap) {
        if (stop > last) stop = last;
        on_gap(at, stop);
      } else if (const int64_t inside = (at - row.start) % kNormBlock; inside != 0) {
        const int64_t next = at + kNormBlock - inside;  // the end of a block that started before
        if (stop > next) stop = next;
      } else {
        const int64_t most = at + kNormBlock < last ? at + kPairNumel : at + kNormBlock;
        if (stop > most) stop = most;
        on_pair(at, stop, row.index);
      }
      at = stop;
    }
  }
}
constexpr int64_t norm_tiles(int64_t numel) { return tiles_for(numel, int64_t{kWarps} * kPairNumel); }

// ---- the elements of a pair that a lane takes

// A whole pair that starts at a multiple of 16 bytes moves in full accesses, and neighbouring lanes take neighbouring
// ones.
template <class Stored>
struct LaneOrder {
  static constexpr int kEach = kAccessBytes / static_cast<int>(sizeof(Stored));
  static constexpr int kAccesses = static_cast<int>(kPairNumel) / kWarp / kEach;
  __device__ __forceinline__ static int first(int access) {
    return (access * kWarp + static_cast<int>(threadIdx.x) % kWarp) * kEach;
  }
  // Whether element `first` of an array that is aligned to 16 bytes is aligned, too.
  __device__ __forceinline__ static bool starts_at(int64_t first) { return first % kEach == 0; }
};

// ---- the partials

// A warp's pair. The second block is shifted by half of the banks against the first, so that both can be read at once.
template <class T>
struct PairTile {
  static constexpr int kStride = static_cast<int>(kNormBlock) + kNormAccumulators;
  T values[kPair * kStride];

  __device__ __forceinline__ T* at(int i) { return values + i + i / static_cast<int>(kNormBlock) * kNormAccumulators; }
};
template <class T>
using WarpTiles = PairTile<T>[kWarps];

template <class T>
__device__ __forceinline__ bool is_finite(T x) {
  return x - x == T(0);
}

// Sums both blocks of this warp's tile in the order of kNormAccumulators, using `add`; missing elements are 0. Lane 0
// has the sum of the first block, and lane kNormAccumulators has that of the second. Waits until the lanes have filled
// the tile, and until all have read it.
template <class T, class Add>
__device__ __forceinline__ double sum_of_tile(const PairTile<T>& tile, const Add& add) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const T* own = tile.values + lane / kNormAccumulators * PairTile<T>::kStride + lane % kNormAccumulators;
  double sum = 0.0;
  __syncwarp();
  ZX_UNROLL
  for (int i = 0; i < kNormBlock; i += kNormAccumulators) sum = add(sum, static_cast<double>(own[i]));
  __syncwarp();
  ZX_UNROLL
  for (int half = kNormAccumulators / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(kAllLanes, sum, half, kNormAccumulators);
  }
  return sum;
}
__device__ __forceinline__ bool has_sum() { return threadIdx.x % kNormAccumulators == 0; }

// sum + x^2. The square of a float is exact in double, so it may be fused.
template <class T>
struct AddSquare {
  __device__ __forceinline__ double operator()(double sum, double x) const {
    if constexpr (std::is_same_v<T, double>) return sum + x * x;
    return std::fma(x, x, sum);
  }
};

// Notes which blocks of a pair have elements that are not finite, if their sums don't tell. Sums of floats or of their
// squares do, but sums of doubles or of powers may overflow while every element is finite.
class NonFinite {
 public:
  template <class T>
  __device__ __forceinline__ void see(int block, T value) {
    seen_ |= static_cast<unsigned>(!is_finite(value)) << block;
  }
  // Every lane of the warp takes part. The answer is for the block that this lane sums.
  __device__ __forceinline__ bool in_own_block() const {
    const bool first = __any_sync(kAllLanes, (seen_ & 1u) != 0) != 0;
    const bool second = __any_sync(kAllLanes, (seen_ & 2u) != 0) != 0;
    return static_cast<int>(threadIdx.x) % kWarp < kNormAccumulators ? first : second;
  }

 private:
  unsigned seen_ = 0;  // by this lane: a bit for each block
};

}  // namespace zx::cuda
