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

// This lane's part of a block: elements [first, first + count) of the shard. A whole part, of a block that is whole, is
// moved in full accesses; of others what is no element is zero.
template <bool kWhole>
struct Part {
  int64_t first;
  int count;

  template <bool kStreaming = false, class T>
  __device__ __forceinline__ Pack<T, kLane> load(const T* from) const {
    return kWhole ? cuda::load<kLane, kStreaming>(from + first) : load_first<kLane>(from + first, count);
  }
  template <Stores kKind, class T>
  __device__ __forceinline__ void store(const Pack<T, kLane>& pack, T* to) const {
    if constexpr (kWhole) return cuda::store<kKind>(pack, to + first);
    store_first(pack, to + first, count);
  }
};

template <bool kHasNegatives>
struct HeldMoment {
  Pack<uint8_t, kLane> codes;
  float scale;
  float values[kLane];

  template <class Part>
  __device__ __forceinline__ void load(const Moment& moment, const Part& part) {
    codes = part.template load<kOnce>(static_cast<const uint8_t*>(moment.values));
    scale = moment.scales[part.first / kMomentBlock];
  }
  __device__ __forceinline__ float get(const DynamicMap& map, int i) const {
    return decode(map.values, codes.at[i], scale);
  }
  // Every lane of the warp takes part.
  template <class Part>
  __device__ __forceinline__ void store(const DynamicMap& map, const Moment& moment, const Part& part) {
    uint32_t key = 0;
    ZX_UNROLL
    for (int i = 0; i < kLane; ++i) {
      const uint32_t other = scale_key<kHasNegatives>(values[i]);
      key = other > key ? other : key;
    }
    ZX_UNROLL
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, key, distance, kWarp);
      key = other > key ? other : key;
    }
    scale = scale_of_key<kHasNegatives>(key);
    const float inverse = 1.0f / scale;
    ZX_UNROLL
    for (int i = 0; i < kLane; ++i) codes.at[i] = encode<kHasNegatives>(map.nearest, values[i], inverse);
    part.template store<Stores::streaming>(codes, static_cast<uint8_t*>(moment.values));
    if (part.first % kMomentBlock == 0) moment.scales[part.first / kMomentBlock] = scale;
  }
};

// Every lane of the warp takes part.
template <bool kAmsgrad, bool kWhole, class Args>
__device__ __forceinline__ void update_block(const Args& a, const Maps& maps, const Folded<float>& folded,
                                             const Part<kWhole>& part) {
  const auto grad = part.template load<kOnce>(a.grad);
  auto param = a.where.template load<kLane>(part);
  HeldMoment<true> exp_avg;
  HeldMoment<false> exp_avg_sq;
  HeldMoment<false> largest;
  exp_avg.load(a.moments.exp_avg, part);
  exp_avg_sq.load(a.moments.exp_avg_sq, part);
  if constexpr (kAmsgrad) largest.load(a.moments.max_exp_avg_sq, part);
  __syncwarp();  // all have read the scales
  AdamLanes<ScalarLane<float>> at[kLane];
  ZX_UNROLL
  for (int i = 0; i < kLane; ++i) {
    at[i].param.x = param.get(i);
    at[i].exp_avg.x = exp_avg.get(maps.with_negatives, i);
    at[i].exp_avg_sq.x = exp_avg_sq.get(maps.without, i);
    if constexpr (kAmsgrad) at[i].max_exp_avg_sq.x = largest.get(maps.without, i);
  }
  update_each<kAmsgrad>(folded, grad, at);
  ZX_UNROLL
  for (int i = 0; i < kLane; ++i) {
    param.set(i, at[i].param.x);
    exp_avg.values[i] = at[i].exp_avg.x;
    exp_avg_sq.values[i] = at[i].exp_avg_sq.x;
    if constexpr (kAmsgrad) largest.values[i] = at[i].max_exp_avg_sq.x;
  }
  if constexpr (!kWhole) {  // what is no element has no say in the scale
    ZX_UNROLL
    for (int i = 0; i < kLane; ++i) {
      if (i < part.count) continue;
      exp_avg.values[i] = exp_avg_sq.values[i] = 0.0f;
      if constexpr (kAmsgrad) largest.values[i] = 0.0f;
    }
  }
  a.where.store(param, part);
  exp_avg.store(maps.with_negatives, a.moments.exp_avg, part);
  exp_avg_sq.store(maps.without, a.moments.exp_avg_sq, part);
  if constexpr (kAmsgrad) largest.store(maps.without, a.moments.max_exp_avg_sq, part);
}

template <class Args, class Part>
__device__ __forceinline__ void update_at(const Args& a, const Maps& maps, const Folded<float>& folded,
                                          const Part& part) {
  if (folded.amsgrad) {
    update_block<true>(a, maps, folded, part);
  } else {
    update_block<false>(a, maps, folded, part);
  }
}

template <class Args>
__device__ __forceinline__ void update_tiles(const Args& a, const Maps& maps, TileRange tiles) {
  const int64_t in_tile = int64_t{threadIdx.x / kWarp} * kMomentBlock;
  const int64_t in_block = int64_t{threadIdx.x % kWarp} * kLane;
  Stretch<float> stretch;
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    const int64_t block = tile * kTile + in_tile;
    if (block >= a.numel) return;
    stretch.find(a, block);  // segments start with a block: none starts inside this one
    if (!stretch.folded.active) continue;
    if (a.aligned && block + kMomentBlock <= stretch.place.stop) {
      update_at(a, maps, stretch.folded, Part<true>{block + in_block, kLane});
    } else {
      const int64_t left = stretch.place.stop - block - in_block;
      const int count = static_cast<int>(left < 0 ? 0 : left < kLane ? left : kLane);
      update_at(a, maps, stretch.folded, Part<false>{block + in_block, count});
    }
  }
}

template <class Args>
__global__ void __launch_bounds__(kThreads, 1) adam_block_kernel(ZX_GRID_CONSTANT const Together<Args> together) {
  ZX_SHARED(Maps, maps);
  copy_maps(maps);
  __syncthreads();
  for_each_shard(together, [&](const Args& a, TileRange tiles) { update_tiles(a, maps, tiles); });
}

}  // namespace

int adam_blockwise(const AdamShards& shards, Stream stream) {
  return with_param(shards.elements(), [&](auto where, auto grad_type) {
    using Where = typename decltype(where)::type;
    using Grad = typename decltype(grad_type)::type;
    using Args = BlockArgs<Where, Grad>;
    Together<Args> together;
    static_assert(kFitsALaunch<Args>);
    for (const auto& [e, s] : shards) {
      together.add({Where(e), static_cast<const Grad*>(e.grad), e.moments, e.numel, s.segments, s.count,
                    static_cast<const Folded<float>*>(s.folded), all_aligned(e)},
                   tiles_for(e.numel, kTile));
    }
    return launch(adam_block_kernel<Args>, together.num_tiles(), stream, together);
  });
}

}  // namespace zx::cuda
