// The update with moments as wide as they are computed, and the choice between the kinds of moments.
#include "cuda/adam.cuh"

namespace zx::cuda {
namespace {

template <class T>
struct WideMoments {
  static constexpr int kBytes = sizeof(T);
  T* exp_avg = nullptr;
  T* exp_avg_sq = nullptr;
  T* max_exp_avg_sq = nullptr;

  WideMoments() = default;
  explicit WideMoments(const Moments& m)
      : exp_avg(static_cast<T*>(m.exp_avg.values)),
        exp_avg_sq(static_cast<T*>(m.exp_avg_sq.values)),
        max_exp_avg_sq(static_cast<T*>(m.max_exp_avg_sq.values)) {}

  template <int N>
  struct Held {
    Pack<T, N> exp_avg;
    Pack<T, N> exp_avg_sq;
    Pack<T, N> largest;
    __device__ __forceinline__ void get(int i, AdamLanes<ScalarLane<T>>& at) const {
      at.exp_avg.x = exp_avg.at[i];
      at.exp_avg_sq.x = exp_avg_sq.at[i];
      at.max_exp_avg_sq.x = largest.at[i];
    }
    __device__ __forceinline__ void set(int i, const AdamLanes<ScalarLane<T>>& at, const Folded<T>& /*folded*/,
                                        int64_t /*element*/) {
      exp_avg.at[i] = at.exp_avg.x;
      exp_avg_sq.at[i] = at.exp_avg_sq.x;
      largest.at[i] = at.max_exp_avg_sq.x;
    }
  };
  template <bool kAmsgrad, int N>
  __device__ __forceinline__ Held<N> load(int64_t i) const {
    Held<N> held{cuda::load<N, kOnce>(exp_avg + i), cuda::load<N, kOnce>(exp_avg_sq + i), {}};
    if constexpr (kAmsgrad) held.largest = cuda::load<N, kOnce>(max_exp_avg_sq + i);
    return held;
  }
  template <bool kAmsgrad, int N>
  __device__ __forceinline__ void store(const Held<N>& held, int64_t i) const {
    cuda::store<Stores::streaming>(held.exp_avg, exp_avg + i);
    cuda::store<Stores::streaming>(held.exp_avg_sq, exp_avg_sq + i);
    if constexpr (kAmsgrad) cuda::store<Stores::streaming>(held.largest, max_exp_avg_sq + i);
  }
};

int adam_wide(const AdamShards& shards, Stream stream) {
  const auto launch = [&](auto where, auto grad) {
    using Where = typename decltype(where)::type;
    return launch_adam<Where, WideMoments<typename Where::Value>, typename decltype(grad)::type>(shards, stream);
  };
  if (shards.elements().param_dtype == DType::f64) return with_grad<PlainParam<double>>(shards.elements(), launch);
  return with_param(shards.elements(), launch);
}

int adam_together(const AdamShards& shards, Stream stream) {
  const int error = fold(shards, stream);
  if (error != cudaSuccess) return error;
  switch (shards.elements().moments.kind) {
    case StateKind::wide:
      return adam_wide(shards, stream);
    case StateKind::bf16:
      return adam_bf16(shards, stream);
    case StateKind::blockwise:
      return adam_blockwise(shards, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int adam(const AdamShards& shards, Stream stream) {
  for (int64_t first = 0; first < shards.count; first += kMostTogether) {
    const int64_t left = shards.count - first;
    const int error = adam_together({shards.shards + first, left < kMostTogether ? left : kMostTogether}, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace zx::cuda
