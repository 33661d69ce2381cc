// The update with moments in 8 bits, see Note [8-bit moments]. A warp has a block of 256 elements, each lane 8 of them.
#include "cuda/adam.cuh"
#include "math/dynamic_map.h"

namespace zx::cuda {
namespace {

constexpr int kLane = kMomentBlock / kWarp;  // elements
constexpr int64_t kTile = int64_t{kWarps} * kMomentBlock;
static_assert(kTile == int64_t{kThreads} * kLane);

struct Maps {
  DynamicMap with_negatives;
  DynamicMap without;
};
__device__ const Maps kMaps{make_dynamic_map(true), make_dynamic_map(false)};

__device__ __forceinline__ void copy_maps(Maps& to) {
  constexpr int kWords = sizeof(Maps) / sizeof(uint32_t);
  const auto* from_bytes = reinterpret_cast<const char*>(&kMaps);
  auto* to_bytes = reinterpret_cast<char*>(&to);
  for (int i = static_cast<int>(threadIdx.x); i < kWords; i += kThreads) {
    memcpy(to_bytes + i * sizeof(uint32_t), from_bytes + i * sizeof(uint32_t), sizeof(uint32_t));
  }
}

template <class Where, class Grad>
struct BlockArgs {
  Where where;
  const Grad* grad;
  Moments moments;
  int64_t numel;
  const Segment* segments;
  int64_t num_segments;
  const Folded<float>* folded;
  bool aligned;  // all of the pointers above, to 16 bytes
};

// This lane's part of a moment: elements [first, first + count) of the shard, the others zero.
struct Part {
  int64_t first;
  int count;
  bool wide;
};

template <bool kHasNegatives>
struct HeldMoment {
  Pack<uint8_t, kLane> codes;
  float scale;
  float values[kLane];

  __device__ __forceinline__ void load(const Moment& moment, const Part& part) {
    const auto* from = static_cast<const uint8_t*>(moment.values) + part.first;
    codes = part.wide ? cuda::load<kLane>(from) : load_first<kLane>(from, part.count);
    scale = moment.scales[part.first / kMomentBlock];
  }
  __device__ __forceinline__ float get(const DynamicMap& map, int i) const {
    return decode(map.values, codes.at[i], scale);
  }
  // Every lane of the warp takes part.
  __device__ __forceinline__ void store(const DynamicMap& map, const Moment& moment, const Part& part) {
    uint32_t key = 0;
    ZX_UNROLL
    for (int i = 0; i < kLane; ++i) {
      const uint32_t other = scale_key(values[i]);
      key = other > key ? other : key;
    }
    ZX_UNROLL
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, key, distance, kWarp);
      key = other > key ? other : key;
    }
    scale = scale_of_key(key);
    ZX_UNROLL
    for (int i = 0; i < kLane; ++i) codes.at[i] = encode<kHasNegatives>(map.nearest, values[i], scale);
    auto* to = static_cast<uint8_t*>(moment.values) + part.first;
    if (part.wide) {
      cuda::store(codes, to);
    } else {
      store_first(codes, to, part.count);
    }
    if (part.first % kMomentBlock == 0) moment.scales[part.first / kMomentBlock] = scale;
  }
};

// Every lane of the warp takes part.
template <bool kAmsgrad, class Args>
__device__ __forceinline__ void update_block(const Args& a, const Maps& maps, const AdamStep<float>& step,
                                             const Part& part) {
  const auto grad = part.wide ? load<kLane>(a.grad + part.first) : load_first<kLane>(a.grad + part.first, part.count);
  auto param =
      part.wide ? a.where.template load<kLane>(part.first) : a.where.template load_first<kLane>(part.first, part.count);
  HeldMoment<true> exp_avg;
  HeldMoment<false> exp_avg_sq;
  HeldMoment<false> largest;
  exp_avg.load(a.moments.exp_avg, part);
  exp_avg_sq.load(a.moments.exp_avg_sq, part);
  if constexpr (kAmsgrad) largest.load(a.moments.max_exp_avg_sq, part);
  __syncwarp();  // all have read the scales
  ZX_UNROLL
  for (int i = 0; i < kLane; ++i) {
    AdamLanes<ScalarLane<float>> at{{param.get(i)}, {}, {}, {}};
    at.exp_avg.x = exp_avg.get(maps.with_negatives, i);
    at.exp_avg_sq.x = exp_avg_sq.get(maps.without, i);
    if constexpr (kAmsgrad) at.max_exp_avg_sq.x = largest.get(maps.without, i);
    adam_update<kAmsgrad>(step, ScalarLane<float>::load(&grad.at[i]), at);
    param.set(i, at.param.x);
    const bool live = i < part.count;
    exp_avg.values[i] = live ? at.exp_avg.x : 0.0f;
    exp_avg_sq.values[i] = live ? at.exp_avg_sq.x : 0.0f;
    if constexpr (kAmsgrad) largest.values[i] = live ? at.max_exp_avg_sq.x : 0.0f;
  }
  if (part.wide) {
    a.where.store(param, part.first);
  } else {
    a.where.store_first(param, part.first, part.count);
  }
  exp_avg.store(maps.with_negatives, a.moments.exp_avg, part);
  exp_avg_sq.store(maps.without, a.moments.exp_avg_sq, part);
  if constexpr (kAmsgrad) largest.store(maps.without, a.moments.max_exp_avg_sq, part);
}

template <class Args>
__global__ void __launch_bounds__(kThreads) adam_block_kernel(Args a) {
  ZX_SHARED(Maps, maps);
  copy_maps(maps);
  __syncthreads();
  const int64_t in_tile = int64_t{threadIdx.x / kWarp} * kMomentBlock;
  const int64_t in_block = int64_t{threadIdx.x % kWarp} * kLane;
  Stretch<float> stretch;
  const TileRange tiles = tiles_of_block(tiles_for(a.numel, kTile));
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    const int64_t block = tile * kTile + in_tile;
    if (block >= a.numel) return;
    stretch.find(a, block);  // segments start with a block: none starts inside this one
    if (!stretch.folded.active) continue;
    const int64_t left = stretch.stop - block - in_block;
    const int count = static_cast<int>(left < 0 ? 0 : left < kLane ? left : kLane);
    const Part part{block + in_block, count, a.aligned && count == kLane};
    if (stretch.folded.amsgrad) {
      update_block<true>(a, maps, stretch.folded.step, part);
    } else {
      update_block<false>(a, maps, stretch.folded.step, part);
    }
  }
}

}  // namespace

int adam_blockwise(const AdamElements& e, const AdamSegments& s, Stream stream) {
  return with_param(e, [&](auto where, const auto* grad) {
    using Args = BlockArgs<decltype(where), std::remove_cv_t<std::remove_pointer_t<decltype(grad)>>>;
    const Args args{
        where,         grad, e.moments, e.numel, s.segments, s.count, static_cast<const Folded<float>*>(s.folded),
        all_aligned(e)};
    return launch(adam_block_kernel<Args>, tiles_for(e.numel, kTile), stream, args);
  });
}

}  // namespace zx::cuda
