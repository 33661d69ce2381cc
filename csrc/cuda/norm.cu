// Norms of a shard, and the value that an exact sum stands for.
#include "cuda/kernels.h"
#include "cuda/norm_block.cuh"

namespace zx::cuda {
namespace {

template <class Stored>
struct NormArgs {
  NormShard shard;
  Norm kind;
  bool aligned;  // the values, to 16 bytes
};

// Any order but 1, 2 and infinity needs pow(), whose last bits are the device's own; a kernel of its own keeps its
// registers out of the others.
template <class Stored, bool kPowers>
__global__ void __launch_bounds__(kThreads, 1) norm_kernel(NormArgs<Stored> a) {
  using T = std::conditional_t<std::is_same_v<Stored, double>, double, float>;
  using Order = LaneOrder<Stored>;
  ZX_SHARED(WarpTiles<T>, tiles);
  ZX_SHARED(Words, words);
  clear_words(words);
  T* tile = tiles[threadIdx.x / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto* values = static_cast<const Stored*>(a.shard.values);
  // As the bits of doubles, which order as the numbers do, with infinity and then NaN on top.
  int64_t largest = 0;
  const bool sums = a.kind != Norm::max_of_abs;  // which needs no tile

  const auto on_block = [&](int64_t first, int64_t last, int64_t /*segment*/) {
    bool finite = true;
    const auto take = [&](T value, int at) {
      finite = finite && is_finite(value);
      if (sums) tile[at] = value;
      const int64_t bits = std::bit_cast<int64_t>(std::fabs(static_cast<double>(value)));
      largest = bits > largest ? bits : largest;
    };
    if (a.aligned && last - first == kNormBlock && first * static_cast<int64_t>(sizeof(Stored)) % kAccessBytes == 0) {
      ZX_UNROLL
      for (int access = 0; access < Order::kAccesses; ++access) {
        const int at = Order::first(access);
        const auto loaded = load<Order::kEach>(values + first + at);
        ZX_UNROLL
        for (int j = 0; j < Order::kEach; ++j) take(ScalarLane<T>::load(&loaded.at[j]).x, at + j);
      }
    } else {
      for (int at = lane; at < kNormBlock; at += kWarp) {
        take(first + at < last ? ScalarLane<T>::load(values + first + at).x : T(0), at);
      }
    }
    if (!sums) return;
    double partial = 0.0;
    if constexpr (kPowers) {
      const double order = a.shard.order;
      partial = sum_of_tile(tile, [order](double x) { return std::pow(std::fabs(x), order); });
    } else {
      const bool squares = a.kind == Norm::sum_of_squares;
      partial = sum_of_tile(tile, [squares](double x) { return squares ? x * x : std::fabs(x); });
    }
    const bool all_finite = !any_lane(!finite);
    if (lane != 0) return;
    exact_add_shared(words, partial);
    if (!all_finite) atomic_add(words + kExactNonFinite, 1);
  };
  for_each_norm_block(a.shard.segments, a.shard.num_segments, a.shard.numel, on_block, [](int64_t, int64_t) {});
  if (sums) {
    give_words(words, a.shard.words);
  } else {
    atomic_max(words, largest);
    give_words</*kMax=*/true>(words, a.shard.words);
  }
}

template <class Stored>
int launch_norm(const NormShard& shard, Stream stream) {
  const NormArgs<Stored> args{shard, norm_of_order(shard.order), is_aligned(shard.values)};
  const bool powers = args.kind == Norm::sum_of_powers;
  const auto kernel = powers ? norm_kernel<Stored, true> : norm_kernel<Stored, false>;
  const int error = launch(kernel, norm_tiles(shard.numel), stream, args);
  if (error != cudaSuccess || args.kind == Norm::max_of_abs) return error;
  return carry(shard.words, stream);
}

struct ValueArgs {
  const int64_t* words;
  double order;
  double* value_and_finite;
};

__global__ void __launch_bounds__(kThreads, 1) norm_value_kernel(ValueArgs a) {
  ZX_SHARED(Words, words);
  for (int i = threadIdx.x; i < kExactWords; i += kThreads) words[i] = a.words[i];
  __syncthreads();
  if (threadIdx.x != 0) return;
  double value = 0.0;
  bool finite = words[kExactNonFinite] == 0;
  switch (norm_of_order(a.order)) {
    case Norm::max_of_abs:
      value = std::bit_cast<double>(words[0]);
      finite = is_finite(value);
      break;
    case Norm::sum_of_abs:
      value = exact_value(words);
      break;
    case Norm::sum_of_squares:
      value = std::sqrt(exact_value(words));
      break;
    case Norm::sum_of_powers:
      value = std::pow(exact_value(words), 1.0 / a.order);
      break;
  }
  a.value_and_finite[0] = value;
  a.value_and_finite[1] = finite ? 1.0 : 0.0;
}

struct CarryArgs {
  int64_t* words;
};

__global__ void __launch_bounds__(kThreads, 1) carry_kernel(CarryArgs a) {
  ZX_SHARED(Words, words);
  for (int i = threadIdx.x; i < kExactWords; i += kThreads) words[i] = a.words[i];
  __syncthreads();
  if (threadIdx.x == 0) exact_carry(words);
  __syncthreads();
  for (int i = threadIdx.x; i < kExactWords; i += kThreads) a.words[i] = words[i];
}

}  // namespace

int carry(int64_t* words, Stream stream) { return launch(carry_kernel, 1, stream, CarryArgs{words}); }

int norm(const NormShard& shard, Stream stream) {
  switch (shard.dtype) {
    case DType::f64:
      return launch_norm<double>(shard, stream);
    case DType::f32:
      return launch_norm<float>(shard, stream);
    case DType::bf16:
      return launch_norm<bf16>(shard, stream);
    case DType::f16:
      return launch_norm<f16>(shard, stream);
  }
  return cudaErrorInvalidValue;
}

int norm_value(const int64_t* words, double order, double* value_and_finite, Stream stream) {
  return launch(norm_value_kernel, 1, stream, ValueArgs{words, order, value_and_finite});
}

}  // namespace zx::cuda
