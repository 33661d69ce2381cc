// Makes what the ranks sent into the mean gradient's shard, and takes the norm's partials while a block is in
// registers.
#include "cuda/kernels.h"
#include "cuda/norm_block.cuh"

namespace zx::cuda {
namespace {

// ---- flags after the shard in each slice: see read_flags_ in csrc/bindings/module.cpp

struct ReadFlagsArgs {
  Slices slices;
  int64_t shard_numel;
  SegmentFlags flags;
};

template <class Bits>
__global__ void __launch_bounds__(kThreads) read_flags_kernel(ReadFlagsArgs a) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < a.flags.num_segments; i += stride) {
    bool present = false;
    bool replaced = false;
    for (int64_t slice = 0; slice < a.slices.count; ++slice) {
      const Bits* flags = in_global(static_cast<const Bits*>(a.slices.starts[slice]) + a.shard_numel);
      present = present || flags[2 * i] != 0;  // any bit: a flag is 0 or a positive number
      replaced = replaced || flags[2 * i + 1] != 0;
    }
    a.flags.present[i] = present || (a.flags.present[i] != 0 && !replaced) ? 1 : 0;
    a.flags.replaced[i] = replaced ? 1 : 0;
  }
}

// ---- the sum

template <class T, class Wire>
struct ReduceArgs {
  const Wire* const* slices;
  int64_t num_slices;
  T world;
  T inverse;  // of a world that is a power of two: a product with it has the quotient's bits, for less
  ReducedShard out;
  bool aligned;  // the shard, to 16 bytes
};

// The mean of kCount times N elements, kStride apart, from i on: they are added in rank order, divided and stored.
// `sum` returns the stored values.
template <bool kDivides, int N, int kCount, int kStride, class T, class Wire>
__device__ __forceinline__ void mean(const ReduceArgs<T, Wire>& a, bool accumulate, int64_t i,
                                     Pack<T, N> (&sum)[kCount]) {
  Pack<Wire, N> loaded[kCount];
  ZX_UNROLL_TWICE
  for (int64_t rank = 0; rank < a.num_slices; ++rank) {
    const Wire* slice = in_global(a.slices[rank] + i);
    ZX_UNROLL
    for (int k = 0; k < kCount; ++k) loaded[k] = load<N, kOnce>(slice + k * kStride);
    ZX_UNROLL
    for (int k = 0; k < kCount; ++k) {
      ZX_UNROLL
      for (int j = 0; j < N; ++j) {
        const T x = ScalarLane<T>::load(&loaded[k].at[j]).x;
        sum[k].at[j] = rank == 0 ? x : sum[k].at[j] + x;  // not 0 + x, which loses a -0
      }
    }
  }
  Wire* shard = static_cast<Wire*>(a.out.shard) + i;
  ZX_UNROLL
  for (int k = 0; k < kCount; ++k) {
    Pack<Wire, N> rounded{};
    if (accumulate) rounded = load<N>(shard + k * kStride);
    ZX_UNROLL
    for (int j = 0; j < N; ++j) {
      T x = kDivides ? sum[k].at[j] / a.world : sum[k].at[j] * a.inverse;
      if (accumulate) x = x + ScalarLane<T>::load(&rounded.at[j]).x;
      ScalarLane<T>{x}.store(&rounded.at[j]);
      sum[k].at[j] = ScalarLane<T>::load(&rounded.at[j]).x;
    }
    store(rounded, shard + k * kStride);
  }
}

template <class T, class Wire>
__device__ __forceinline__ bool all_aligned(const ReduceArgs<T, Wire>& a) {
  bool aligned = a.aligned;
  for (int64_t rank = 0; rank < a.num_slices; ++rank) aligned = aligned && is_aligned(a.slices[rank]);
  return aligned;
}

template <class T, class Wire, bool kDivides>
__global__ void __launch_bounds__(kThreads, 1) reduce_kernel(ReduceArgs<T, Wire> a) {
  using Order = LaneOrder<Wire>;
  ZX_SHARED(WarpTiles<T>, tiles);
  ZX_SHARED(Words, words);
  clear_words(words);
  PairTile<T>& tile = tiles[threadIdx.x / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const ReducedShard& out = a.out;
  const bool aligned = all_aligned(a);
  LaneSum lane_sum;

  const auto on_pair = [&](int64_t first, int64_t stop, int64_t segment) {
    const bool accumulate = out.accumulate && out.replaced[segment] == 0;
    NonFinite non_finite;
    if (aligned && stop - first == kPairNumel && Order::starts_at(first)) {
      Pack<T, Order::kEach> values[Order::kAccesses];
      mean<kDivides, Order::kEach, Order::kAccesses, Order::kEach * kWarp>(a, accumulate, first + Order::first(0),
                                                                           values);
      ZX_UNROLL
      for (int access = 0; access < Order::kAccesses; ++access) {
        store(values[access], tile.at(Order::first(access)));
        ZX_UNROLL
        for (int j = 0; j < Order::kEach; ++j) non_finite.see(access * kPair / Order::kAccesses, values[access].at[j]);
      }
    } else {
      for (int at = lane; at < kPairNumel; at += kWarp) {
        Pack<T, 1> value[1] = {};
        if (first + at < stop) mean<kDivides, 1, 1, 1>(a, accumulate, first + at, value);
        *tile.at(at) = value[0].at[0];
        non_finite.see(at / static_cast<int>(kNormBlock), value[0].at[0]);
      }
    }
    const double sum = sum_of_tile(tile, AddSquare<T>{});
    const bool finite = std::is_same_v<T, double> ? !non_finite.in_own_block() : is_finite(sum);
    lane_sum.add(words, has_sum() ? sum : 0.0);
    if (has_sum() && !finite) atomic_add(words + kExactNonFinite, 1);
  };
  const auto on_gap = [&](int64_t first, int64_t stop) {  // padding is sent too, where shards are gathered
    for (int64_t i = first + lane; i < stop; i += kWarp) static_cast<Wire*>(out.shard)[i] = Wire{};
  };
  for_each_norm_pair(out.segments, out.num_segments, out.numel, on_pair, on_gap);
  lane_sum.give(words);
  give_words(words, out.words);
}

template <class T, class Wire>
int launch_reduce(const Slices& slices, int64_t world, const ReducedShard& out, Stream stream) {
  const T divisor = static_cast<T>(world);
  const ReduceArgs<T, Wire> args{reinterpret_cast<const Wire* const*>(slices.starts),
                                 slices.count,
                                 divisor,
                                 T(1) / divisor,
                                 out,
                                 is_aligned(out.shard)};
  const bool is_power_of_two = (world & (world - 1)) == 0;
  const auto kernel = is_power_of_two ? reduce_kernel<T, Wire, false> : reduce_kernel<T, Wire, true>;
  const int error = launch(kernel, norm_tiles(out.numel), stream, args);
  return error == cudaSuccess ? carry(out.words, stream) : error;
}

}  // namespace

int read_flags(const Slices& slices, int64_t shard_numel, const SegmentFlags& flags, Stream stream) {
  const ReadFlagsArgs args{slices, shard_numel, flags};
  const int64_t tiles = tiles_for(flags.num_segments, kThreads);
  switch (slices.dtype) {
    case DType::f64:
      return launch(read_flags_kernel<uint64_t>, tiles, stream, args);
    case DType::f32:
      return launch(read_flags_kernel<uint32_t>, tiles, stream, args);
    case DType::bf16:
    case DType::f16:
      return launch(read_flags_kernel<uint16_t>, tiles, stream, args);
  }
  return cudaErrorInvalidValue;
}

int reduce(const Slices& slices, int64_t world, const ReducedShard& out, Stream stream) {
  switch (slices.dtype) {
    case DType::f64:
      return launch_reduce<double, double>(slices, world, out, stream);
    case DType::f32:
      return launch_reduce<float, float>(slices, world, out, stream);
    case DType::bf16:
      return launch_reduce<float, bf16>(slices, world, out, stream);
    case DType::f16:
      return launch_reduce<float, f16>(slices, world, out, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace zx::cuda
