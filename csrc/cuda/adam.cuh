// The update: one pass from a shard's gradient to moments, master and parameter, for any number of segments. With
// moments that are stored one by one; adam_blockwise.cu has those that share a scale.
#pragma once

#include "cuda/adam_param.cuh"
#include "cuda/fold.cuh"
#include "cuda/together.cuh"
#include "cuda/unchecked.cuh"

namespace zx::cuda {

template <class Where, class Stored, class Grad>
struct AdamArgs {
  using Value = typename Where::Value;
  // So many elements a thread that the narrowest stream, too, moves 16 bytes at a time.
  static constexpr int kNarrower = Where::kNarrowestBytes < sizeof(Grad) ? Where::kNarrowestBytes : sizeof(Grad);
  static constexpr int kNarrowest = Stored::kBytes < kNarrower ? Stored::kBytes : kNarrower;
  static constexpr int kVector = kAccessBytes / kNarrowest;

  Where where;
  const Grad* grad;
  Stored moments;
  int64_t numel;
  const Segment* segments;
  int64_t num_segments;
  const Folded<Value>* folded;
  bool aligned;  // all of the pointers above, to 16 bytes
};

template <bool kAmsgrad, int N, class Args, class T = typename Args::Value>
__device__ __forceinline__ void update(const Args& a, const Folded<T>& folded, int64_t i) {
  const auto grad = load<N, kOnce>(a.grad + i);
  auto param = a.where.template load<N>(i);
  auto moments = a.moments.template load<kAmsgrad, N>(i);
  AdamLanes<ScalarLane<T>> at[N];
  ZX_UNROLL
  for (int j = 0; j < N; ++j) {
    at[j].param.x = param.get(j);
    moments.get(j, at[j]);
  }
  update_each<kAmsgrad>(folded, grad, at);
  ZX_UNROLL
  for (int j = 0; j < N; ++j) {
    param.set(j, at[j].param.x);
    moments.set(j, at[j], folded, i + j);
  }
  a.where.store(param, i);
  a.moments.template store<kAmsgrad>(moments, i);
}

template <int N, class Args, class T = typename Args::Value>
__device__ __forceinline__ void update_at(const Args& a, const Stretch<T>& stretch, int64_t i) {
  if (!stretch.folded.active) return;
  if (stretch.folded.amsgrad) {
    update<true, N>(a, stretch.folded, i);
  } else {
    update<false, N>(a, stretch.folded, i);
  }
}

template <class Args>
__device__ __forceinline__ void update_tiles(const Args& a, TileRange tiles) {
  constexpr int kVector = Args::kVector;
  constexpr int64_t kTile = int64_t{kThreads} * kVector;
  Stretch<typename Args::Value> stretch;
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    const int64_t first = tile * kTile + int64_t{threadIdx.x} * kVector;
    if (first >= a.numel) return;
    stretch.find(a, first);
    if (a.aligned && first + kVector <= stretch.place.stop) {
      update_at<kVector>(a, stretch, first);
    } else {  // an end of a segment lies inside
      const int64_t stop = first + kVector < a.numel ? first + kVector : a.numel;
      for (int64_t i = first; i < stop; ++i) {
        stretch.find(a, i);
        update_at<1>(a, stretch, i);
      }
    }
  }
}

// The 1 keeps ptxas from spilling to have one more block on a processor.
template <class Args>
__global__ void __launch_bounds__(kThreads, 1) adam_kernel(ZX_GRID_CONSTANT const Together<Args> together) {
  for_each_shard(together, [](const Args& a, TileRange tiles) { update_tiles(a, tiles); });
}

inline bool all_aligned(const AdamElements& e) {
  const Moments& m = e.moments;
  return is_aligned(e.param) && is_aligned(e.master) && is_aligned(e.grad) && is_aligned(m.exp_avg.values) &&
         is_aligned(m.exp_avg_sq.values) && is_aligned(m.max_exp_avg_sq.values);
}

template <class Where, class Stored, class Grad>
int launch_adam(const AdamShards& shards, Stream stream) {
  using Args = AdamArgs<Where, Stored, Grad>;
  Together<Args> together;
  static_assert(kFitsALaunch<Args>);
  for (const auto& [e, s] : shards) {
    together.add({Where(e), static_cast<const Grad*>(e.grad), Stored(e.moments), e.numel, s.segments, s.count,
                  static_cast<const Folded<typename Args::Value>*>(s.folded), all_aligned(e)},
                 tiles_for(e.numel, int64_t{kThreads} * Args::kVector));
  }
  return launch(adam_kernel<Args>, together.num_tiles(), stream, together);
}

}  // namespace zx::cuda
