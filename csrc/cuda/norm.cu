// Norms of a shard, and the value that an exact sum stands for.
#include "cuda/kernels.h"
#include "cuda/norm_block.cuh"

namespace zx::cuda {
namespace {

template <class Stored>
struct NormArgs {
  NormShard shard;
  bool aligned;  // the values, to 16 bytes
};

// Any order but 1, 2 and infinity needs pow(), whose last bits are the device's own.
template <class Stored, Norm kNorm>
__global__ void __launch_bounds__(kThreads, 1) norm_kernel(NormArgs<Stored> a) {
  using T = std::conditional_t<std::is_same_v<Stored, double>, double, float>;
  using Order = LaneOrder<Stored>;
  ZX_SHARED(WarpTiles<T>, tiles);
  ZX_SHARED(Words, words);
  clear_words(words);
  PairTile<T>& tile = tiles[threadIdx.x / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto* values = static_cast<const Stored*>(a.shard.values);
  // The largest magnitude as the bits of a double. Such bits order as the numbers do, with infinity and then NaN on
  // top.
  int64_t largest = 0;
  LaneSum lane_sum;

  const KeptBits kept = a.shard.kept;
  const auto on_pair = [&](int64_t first, int64_t stop, int64_t /*segment*/) {
    NonFinite non_finite;
    const auto see = [&](T value, int at) {
      if constexpr (kNorm == Norm::max_of_abs) {
        const int64_t bits = std::bit_cast<int64_t>(std::fabs(static_cast<double>(value)));
        largest = bits > largest ? bits : largest;
      } else {
        non_finite.see(at / static_cast<int>(kNormBlock), value);
      }
    };
    if (a.aligned && stop - first == kPairNumel && Order::starts_at(first)) {
      Pack<Stored, Order::kEach> loaded[Order::kAccesses];
      ZX_UNROLL
      for (int access = 0; access < Order::kAccesses; ++access) {
        loaded[access] = load<Order::kEach>(values + first + Order::first(access));
      }
      ZX_UNROLL
      for (int access = 0; access < Order::kAccesses; ++access) {
        Pack<T, Order::kEach> wide;
        ZX_UNROLL
        for (int j = 0; j < Order::kEach; ++j) {
          wide.at[j] = ScalarLane<T>::load(&loaded[access].at[j]).x;
          if (!kept.has_all() && !kept.at(first + Order::first(access) + j)) wide.at[j] = T(0);
          see(wide.at[j], access * static_cast<int>(kPairNumel) / Order::kAccesses);
        }
        if constexpr (kNorm != Norm::max_of_abs) store(wide, tile.at(Order::first(access)));
      }
    } else {
      for (int at = lane; at < kPairNumel; at += kWarp) {
        const bool counts = first + at < stop && (kept.has_all() || kept.at(first + at));
        const T value = counts ? ScalarLane<T>::load(values + first + at).x : T(0);
        see(value, at);
        if constexpr (kNorm != Norm::max_of_abs) *tile.at(at) = value;
      }
    }
    if constexpr (kNorm != Norm::max_of_abs) {
      double sum = 0.0;
      if constexpr (kNorm == Norm::sum_of_squares) {
        sum = sum_of_tile(tile, AddSquare<T>{});
      } else if constexpr (kNorm == Norm::sum_of_abs) {
        sum = sum_of_tile(tile, [](double so_far, double x) { return so_far + std::fabs(x); });
      } else {
        const double order = a.shard.order;
        sum = sum_of_tile(tile, [order](double so_far, double x) { return so_far + std::pow(std::fabs(x), order); });
      }
      constexpr bool kSumTells = !std::is_same_v<T, double> && kNorm != Norm::sum_of_powers;
      const bool finite = kSumTells ? is_finite(sum) : !non_finite.in_own_block();
      lane_sum.add(words, has_sum() ? sum : 0.0);
      if (has_sum() && !finite) atomic_add(words + kExactNonFinite, 1);
    }
  };
  for_each_norm_pair(a.shard.segments, a.shard.num_segments, a.shard.numel, on_pair, [](int64_t, int64_t) {});
  if constexpr (kNorm == Norm::max_of_abs) {
    atomic_max(words, largest);
    give_words</*kMax=*/true>(words, a.shard.words);
  } else {
    lane_sum.give(words);
    give_words(words, a.shard.words);
  }
}

template <class Stored>
int launch_norm(const NormShard& shard, Stream stream) {
  const NormArgs<Stored> args{shard, is_aligned(shard.values)};
  const auto run = [&](auto kernel) { return launch(kernel, norm_tiles(shard.numel), stream, args); };
  int error = cudaSuccess;
  switch (norm_of_order(shard.order)) {
    case Norm::max_of_abs:
      return run(norm_kernel<Stored, Norm::max_of_abs>);
    case Norm::sum_of_abs:
      error = run(norm_kernel<Stored, Norm::sum_of_abs>);
      break;
    case Norm::sum_of_squares:
      error = run(norm_kernel<Stored, Norm::sum_of_squares>);
      break;
    case Norm::sum_of_powers:
      error = run(norm_kernel<Stored, Norm::sum_of_powers>);
      break;
  }
  return error == cudaSuccess ? carry(shard.words, stream) : error;
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
