// The update with states in 8 bits, see Note [8-bit states]. A warp takes a block of 256 elements, and each lane takes
// 8 of them.
#include "cuda/update.cuh"
#include "math/dynamic_map.h"

namespace zx::cuda {
namespace {

constexpr int kLane = kStateBlock / kWarp;  // elements
constexpr int64_t kTile = int64_t{kWarps} * kStateBlock;
static_assert(kTile == int64_t{kThreads} * kLane);

struct Maps {
  DynamicMap with_negatives;
  DynamicMap without;

  template <bool kHasNegatives>
  __device__ __forceinline__ const DynamicMap& of() const {
    return kHasNegatives ? with_negatives : without;
  }
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

template <class OfRule, class Where, class Grad>
struct BlockArgs {
  using Rule = OfRule;

  Where where;
  const Grad* grad;
  StoredStates states;
  int64_t numel;
  const Segment* segments;
  int64_t num_segments;
  const Folded<Rule, float>* folded;
  bool aligned;         // all of the arrays above that are indexed by element, to 16 bytes
  const uint8_t* mask;  // null: all elements are kept
};

// This lane's elements of a block: [first, first + count) of the shard. Those of a whole block are moved in
// full accesses; in other blocks, the places without an element are zero.
template <bool kWhole>
struct LaneSpan {
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

struct LoadedState {
  Pack<uint8_t, kLane> codes;
  float scale;
  float values[kLane];

  template <class Span>
  __device__ __forceinline__ void load(const StoredState& state, const Span& span) {
    codes = span.template load<kOnce>(static_cast<const uint8_t*>(state.values));
    scale = state.scales[span.first / kStateBlock];
  }
  __device__ __forceinline__ float get(const DynamicMap& map, int i) const {
    return decode(map.values, codes.at[i], scale);
  }
  // Every lane of the warp takes part.
  template <bool kHasNegatives, class Span>
  __device__ __forceinline__ void store(const DynamicMap& map, const StoredState& state, const Span& span) {
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
    span.template store<Stores::streaming>(codes, static_cast<uint8_t*>(state.values));
    if (span.first % kStateBlock == 0) state.scales[span.first / kStateBlock] = scale;
  }
};

// Every lane of the warp takes part.
template <int kStates, bool kWhole, class Args, class Rule = typename Args::Rule>
__device__ __forceinline__ void update_block(const Args& a, const Maps& maps, const Folded<Rule, float>& folded,
                                             const LaneSpan<kWhole>& span) {
  auto grad = span.template load<kOnce>(a.grad);
  auto param = a.where.template load<kLane>(span);
  LoadedState loaded[kRoomFor<kStates>];
  ZX_UNROLL
  for (int s = 0; s < kStates; ++s) loaded[s].load(a.states.at[s], span);
  __syncwarp();  // all have read the scales
  Lanes<ScalarLane<float>, kStates> lanes[kLane];
  ZX_UNROLL
  for (int i = 0; i < kLane; ++i) {
    lanes[i].param.x = param.get(i);
    for_each_state<kStates>([&](auto s) {
      const DynamicMap& map = maps.template of<Rule::kStates[decltype(s)::value].has_negatives>();
      lanes[i].state[s.value].x = loaded[s.value].get(map, i);
    });
  }
  for_each_masked<kLane>(a.mask, span.first, span.count, [&](int i) {  // they must have no part in a scale
    grad.at[i] = {};
    lanes[i] = {};
  });
  update_each(folded, grad, lanes);
  clear_masked(a.mask, span.first, lanes, span.count);
  ZX_UNROLL
  for (int i = 0; i < kLane; ++i) {
    param.set(i, lanes[i].param.x);
    ZX_UNROLL
    for (int s = 0; s < kStates; ++s) loaded[s].values[i] = lanes[i].state[s].x;
  }
  if constexpr (!kWhole) {  // places without an element must not affect the scale
    ZX_UNROLL
    for (int i = 0; i < kLane; ++i) {
      if (i < span.count) continue;
      ZX_UNROLL
      for (int s = 0; s < kStates; ++s) loaded[s].values[i] = 0.0f;
    }
  }
  a.where.store(param, span);
  for_each_state<kStates>([&](auto s) {
    constexpr bool kHasNegatives = Rule::kStates[decltype(s)::value].has_negatives;
    loaded[s.value].template store<kHasNegatives>(maps.template of<kHasNegatives>(), a.states.at[s.value], span);
  });
}

template <class Args, class Rule, class Span>
__device__ __forceinline__ void update_at(const Args& a, const Maps& maps, const Folded<Rule, float>& folded,
                                          const Span& span) {
  with_num_states(folded.states, [&](auto count) { update_block<decltype(count)::value>(a, maps, folded, span); });
}

template <class Args>
__device__ __forceinline__ void update_tiles(const Args& a, const Maps& maps, TileRange tiles) {
  const int64_t in_tile = int64_t{threadIdx.x / kWarp} * kStateBlock;
  const int64_t in_block = int64_t{threadIdx.x % kWarp} * kLane;
  FoundSegment<typename Args::Rule, float> segment;
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    const int64_t block = tile * kTile + in_tile;
    if (block >= a.numel) return;
    segment.find(a, block);  // segments start with a block: none starts inside this one
    if (!segment.folded.active) continue;
    if (a.aligned && block + kStateBlock <= segment.row.stop) {
      update_at(a, maps, segment.folded, LaneSpan<true>{block + in_block, kLane});
    } else {
      const int64_t left = segment.row.stop - block - in_block;
      const int count = static_cast<int>(left < 0 ? 0 : left < kLane ? left : kLane);
      update_at(a, maps, segment.folded, LaneSpan<false>{block + in_block, count});
    }
  }
}

template <class Args>
__global__ void __launch_bounds__(kThreads, 1) update_block_kernel(ZX_GRID_CONSTANT const Together<Args> together) {
  ZX_SHARED(Maps, maps);
  copy_maps(maps);
  __syncthreads();
  for_each_shard(together, [&](const Args& a, TileRange tiles) { update_tiles(a, maps, tiles); });
}

}  // namespace

int update_blockwise(const UpdateShards& shards, Stream stream) {
  const auto launch_all = [&](auto rule, auto where, auto grad) {
    using Rule = typename decltype(rule)::type;
    using Where = typename decltype(where)::type;
    using Grad = typename decltype(grad)::type;
    using Args = BlockArgs<Rule, Where, Grad>;
    Together<Args> together;
    static_assert(kFitsALaunch<Args>);
    for (const auto& [e, s] : shards) {
      together.add({Where(e), static_cast<const Grad*>(e.grad), e.states, e.numel, s.segments, s.count,
                    static_cast<const Folded<Rule, float>*>(s.folded), all_aligned(e), e.kept.bits},
                   tiles_for(e.numel, kTile));
    }
    return launch(update_block_kernel<Args>, together.num_tiles(), stream, together);
  };
  return with_rule(shards.elements().rule, [&](auto rule) {
    return with_param(shards.elements(), [&](auto where, auto grad) { return launch_all(rule, where, grad); });
  });
}

}  // namespace zx::cuda
