// The update: one pass from a shard's gradient to states, master and parameter, for any number of segments. These
// states are stored one by one; update_blockwise.cu has the states that share a scale.
#pragma once

#include "cuda/fold.cuh"
#include "cuda/mask.cuh"
#include "cuda/together.cuh"
#include "cuda/unchecked.cuh"
#include "cuda/update_param.cuh"

namespace zx::cuda {

// The states of a rule that computes in T, each stored as Stored: as T, or as bf16 that is rounded stochastically.
template <class Rule, class T, class Stored>
struct EachState {
  static constexpr int kMost = kMostStatesOf<Rule>;
  Stored* values[kMost] = {};

  EachState() = default;
  explicit EachState(const StoredStates& states) {
    for (int s = 0; s < kMost; ++s) values[s] = static_cast<Stored*>(states.at[s].values);
  }

  // kStates states of N elements.
  template <int kStates, int N>
  struct Loaded {
    Pack<Stored, N> state[kRoomFor<kStates>];

    __device__ __forceinline__ void get(int i, Lanes<ScalarLane<T>, kStates>& lanes) const {
      ZX_UNROLL
      for (int s = 0; s < kStates; ++s) lanes.state[s] = ScalarLane<T>::load(&state[s].at[i]);
    }
    __device__ __forceinline__ void set(int i, const Lanes<ScalarLane<T>, kStates>& lanes,
                                        const Folded<Rule, T>& folded, int64_t element) {
      if constexpr (std::is_same_v<Stored, T>) {
        ZX_UNROLL
        for (int s = 0; s < kStates; ++s) state[s].at[i] = lanes.state[s].x;
      } else {
        const uint32_t bits = random_bits(folded.random_key, element + folded.param_shift);
        for_each_state<kStates>([&](auto s) {
          constexpr int kShift = Rule::kStates[decltype(s)::value].takes_upper_bits ? 16 : 0;
          state[s.value].at[i] = float_to_bf16_stochastic(lanes.state[s.value].x, bits >> kShift);
        });
      }
    }
  };
  template <int kStates, int N>
  __device__ __forceinline__ Loaded<kStates, N> load(int64_t i) const {
    Loaded<kStates, N> loaded;
    ZX_UNROLL
    for (int s = 0; s < kStates; ++s) loaded.state[s] = cuda::load<N, kOnce>(values[s] + i);
    return loaded;
  }
  template <int kStates, int N>
  __device__ __forceinline__ void store(const Loaded<kStates, N>& loaded, int64_t i) const {
    ZX_UNROLL
    for (int s = 0; s < kStates; ++s) cuda::store<Stores::streaming>(loaded.state[s], values[s] + i);
  }
};

template <class OfRule, class Where, class Stored, class Grad>
struct UpdateArgs {
  using Rule = OfRule;
  using Value = typename Where::Value;
  // Each thread takes enough elements that even the narrowest array moves 16 bytes at a time.
  static constexpr int kStateBytes = sizeof(Stored);
  static constexpr int kNarrower = Where::kNarrowestBytes < sizeof(Grad) ? Where::kNarrowestBytes : sizeof(Grad);
  static constexpr int kNarrowest = kStateBytes < kNarrower ? kStateBytes : kNarrower;
  static constexpr int kVector = kAccessBytes / kNarrowest;

  Where where;
  const Grad* grad;
  EachState<Rule, Value, Stored> states;
  int64_t numel;
  const Segment* segments;
  int64_t num_segments;
  const Folded<Rule, Value>* folded;
  bool aligned;         // all of the arrays above that are indexed by element, to 16 bytes
  const uint8_t* mask;  // null: all elements are kept
};

template <int kStates, int N, class Args, class Rule = typename Args::Rule, class T = typename Args::Value>
__device__ __forceinline__ void update_elements(const Args& a, const Folded<Rule, T>& folded, int64_t i) {
  const auto grad = load<N, kOnce>(a.grad + i);
  auto param = a.where.template load<N>(i);
  auto states = a.states.template load<kStates, N>(i);
  Lanes<ScalarLane<T>, kStates> lanes[N];
  ZX_UNROLL
  for (int j = 0; j < N; ++j) {
    lanes[j].param.x = param.get(j);
    states.get(j, lanes[j]);
  }
  update_each(folded, grad, lanes);
  clear_masked(a.mask, i, lanes);
  ZX_UNROLL
  for (int j = 0; j < N; ++j) {
    param.set(j, lanes[j].param.x);
    states.set(j, lanes[j], folded, i + j);
  }
  a.where.store(param, i);
  a.states.store(states, i);
}

template <int N, class Args, class Rule = typename Args::Rule, class T = typename Args::Value>
__device__ __forceinline__ void update_at(const Args& a, const FoundSegment<Rule, T>& segment, int64_t i) {
  if (!segment.folded.active) return;
  with_num_states(segment.folded.states,
                  [&](auto count) { update_elements<decltype(count)::value, N>(a, segment.folded, i); });
}

template <class Args>
__device__ __forceinline__ void update_tiles(const Args& a, TileRange tiles) {
  constexpr int kVector = Args::kVector;
  constexpr int64_t kTile = int64_t{kThreads} * kVector;
  FoundSegment<typename Args::Rule, typename Args::Value> segment;
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    const int64_t first = tile * kTile + int64_t{threadIdx.x} * kVector;
    if (first >= a.numel) return;
    segment.find(a, first);
    if (a.aligned && first + kVector <= segment.row.stop) {
      update_at<kVector>(a, segment, first);
    } else {  // an end of a segment lies inside
      const int64_t stop = first + kVector < a.numel ? first + kVector : a.numel;
      for (int64_t i = first; i < stop; ++i) {
        segment.find(a, i);
        update_at<1>(a, segment, i);
      }
    }
  }
}

// The 1 keeps ptxas from spilling registers to fit one more block on a processor.
template <class Args>
__global__ void __launch_bounds__(kThreads, 1) update_kernel(ZX_GRID_CONSTANT const Together<Args> together) {
  for_each_shard(together, [](const Args& a, TileRange tiles) { update_tiles(a, tiles); });
}

inline bool all_aligned(const UpdateElements& e) {
  bool aligned = is_aligned(e.param) && is_aligned(e.master) && is_aligned(e.grad);
  for (const StoredState& state : e.states.at) aligned = aligned && is_aligned(state.values);
  return aligned;
}

template <class Rule, class Where, class Stored, class Grad>
int launch_update(const UpdateShards& shards, Stream stream) {
  using Args = UpdateArgs<Rule, Where, Stored, Grad>;
  Together<Args> together;
  static_assert(kFitsALaunch<Args>);
  for (const auto& [e, s] : shards) {
    together.add({Where(e), static_cast<const Grad*>(e.grad), EachState<Rule, typename Where::Value, Stored>(e.states),
                  e.numel, s.segments, s.count, static_cast<const Folded<Rule, typename Where::Value>*>(s.folded),
                  all_aligned(e), e.kept.bits},
                 tiles_for(e.numel, int64_t{kThreads} * Args::kVector));
  }
  return launch(update_kernel<Args>, together.num_tiles(), stream, together);
}

}  // namespace zx::cuda
