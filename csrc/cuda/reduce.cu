// What the ranks sent becomes the mean gradient's shard, with the norm's partials taken while a block is in registers.
#include "cuda/kernels.h"
#include "cuda/norm_block.cuh"

namespace zx::cuda {
namespace {

// ---- flags behind the shard in each slice: see read_flags_ in csrc/bindings.cpp

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
  ReducedShard out;
  bool aligned;  // the shard, to 16 bytes
};

// N elements from i on.
template <int N, class T, class Wire>
__device__ __forceinline__ Pack<T, N> mean(const ReduceArgs<T, Wire>& a, bool accumulate, int64_t i) {
  Wire* shard = static_cast<Wire*>(a.out.shard) + i;
  Pack<T, N> sum{};
  for (int64_t rank = 0; rank < a.num_slices; ++rank) {
    const auto slice = load<N>(in_global(a.slices[rank] + i));
    ZX_UNROLL
    for (int j = 0; j < N; ++j) {
      const T x = ScalarLane<T>::load(&slice.at[j]).x;
      sum.at[j] = rank == 0 ? x : sum.at[j] + x;  // not 0 + x, which loses a -0
    }
  }
  Pack<Wire, N> rounded{};
  if (accumulate) rounded = load<N>(shard);
  ZX_UNROLL
  for (int j = 0; j < N; ++j) {
    T x = sum.at[j] / a.world;
    if (accumulate) x = x + ScalarLane<T>::load(&rounded.at[j]).x;
    ScalarLane<T>{x}.store(&rounded.at[j]);
    sum.at[j] = ScalarLane<T>::load(&rounded.at[j]).x;
  }
  store(rounded, shard);
  return sum;
}

template <class T, class Wire>
__device__ __forceinline__ bool reads_wide(const ReduceArgs<T, Wire>& a, int64_t i) {
  if (!a.aligned || i * static_cast<int64_t>(sizeof(Wire)) % kAccessBytes != 0) return false;
  bool aligned = true;
  for (int64_t rank = 0; rank < a.num_slices; ++rank) aligned = aligned && is_aligned(a.slices[rank]);
  return aligned;
}

template <class T, class Wire>
__global__ void __launch_bounds__(kThreads, 1) reduce_kernel(ReduceArgs<T, Wire> a) {
  using Order = LaneOrder<Wire>;
  ZX_SHARED(WarpTiles<T>, tiles);
  ZX_SHARED(Words, words);
  clear_words(words);
  T* tile = tiles[threadIdx.x / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const ReducedShard& out = a.out;

  const auto on_block = [&](int64_t first, int64_t last, int64_t segment) {
    const bool accumulate = out.accumulate && out.replaced[segment] == 0;
    bool finite = true;
    if (last - first == kNormBlock && reads_wide(a, first)) {
      ZX_UNROLL
      for (int access = 0; access < Order::kAccesses; ++access) {
        const int at = Order::first(access);
        const auto values = mean<Order::kEach>(a, accumulate, first + at);
        ZX_UNROLL
        for (int j = 0; j < Order::kEach; ++j) finite = finite && is_finite(values.at[j]);
        store(values, tile + at);
      }
    } else {
      for (int at = lane; at < kNormBlock; at += kWarp) {
        const T value = first + at < last ? mean<1>(a, accumulate, first + at).at[0] : T(0);
        finite = finite && is_finite(value);
        tile[at] = value;
      }
    }
    const double partial = sum_of_tile(tile, [](double x) { return x * x; });
    const bool all_finite = !any_lane(!finite);
    if (lane != 0) return;
    exact_add_shared(words, partial);
    if (!all_finite) atomic_add(words + kExactNonFinite, 1);
  };
  const auto on_gap = [&](int64_t first, int64_t last) {  // padding travels too, where shards are gathered
    for (int64_t i = first + lane; i < last; i += kWarp) static_cast<Wire*>(out.shard)[i] = Wire{};
  };
  for_each_norm_block(out.segments, out.num_segments, out.numel, on_block, on_gap);
  give_words(words, out.words);
}

template <class T, class Wire>
int launch_reduce(const Slices& slices, int64_t world, const ReducedShard& out, Stream stream) {
  const ReduceArgs<T, Wire> args{reinterpret_cast<const Wire* const*>(slices.starts), slices.count,
                                 static_cast<T>(world), out, is_aligned(out.shard)};
  const int error = launch(reduce_kernel<T, Wire>, norm_tiles(out.numel), stream, args);
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
