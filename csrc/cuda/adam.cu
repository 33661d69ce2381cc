// The update with moments as wide as they are computed, and the choice between the kinds of moments.
#include "cuda/adam.cuh"

namespace zx::cuda {
namespace {

template <class T>
struct WideMoments {
  static constexpr int kBytes = sizeof(T);
  T* exp_avg;
  T* exp_avg_sq;
  T* max_exp_avg_sq;

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
    Held<N> held{cuda::load<N>(exp_avg + i), cuda::load<N>(exp_avg_sq + i), {}};
    if constexpr (kAmsgrad) held.largest = cuda::load<N>(max_exp_avg_sq + i);
    return held;
  }
  template <bool kAmsgrad, int N>
  __device__ __forceinline__ void store(const Held<N>& held, int64_t i) const {
    cuda::store(held.exp_avg, exp_avg + i);
    cuda::store(held.exp_avg_sq, exp_avg_sq + i);
    if constexpr (kAmsgrad) cuda::store(held.largest, max_exp_avg_sq + i);
  }
};

int adam_wide(const AdamElements& e, const AdamSegments& s, Stream stream) {
  const auto launch = [&](auto where, const auto* grad) {
    return launch_adam<decltype(where), WideMoments<typename decltype(where)::Value>>(e, s, where, grad, stream);
  };
  if (e.param_dtype == DType::f64) return with_grad(e, PlainParam<double>{static_cast<double*>(e.param)}, launch);
  return with_param(e, launch);
}

}  // namespace

int adam(const AdamElements& e, const AdamSegments& s, Stream stream) {
  const int error = fold(e.param_dtype == DType::f64, s, stream);
  if (error != cudaSuccess) return error;
  switch (e.moments.kind) {
    case StateKind::wide:
      return adam_wide(e, s, stream);
    case StateKind::bf16:
      return adam_bf16(e, s, stream);
    case StateKind::blockwise:
      return adam_blockwise(e, s, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace zx::cuda
