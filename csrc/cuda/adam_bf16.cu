// The update with moments in bf16, rounded stochastically.
#include "cuda/adam.cuh"

namespace zx::cuda {
namespace {

struct Bf16Moments {
  static constexpr int kBytes = sizeof(bf16);
  bf16* exp_avg = nullptr;
  bf16* exp_avg_sq = nullptr;
  bf16* max_exp_avg_sq = nullptr;

  Bf16Moments() = default;
  explicit Bf16Moments(const Moments& m)
      : exp_avg(static_cast<bf16*>(m.exp_avg.values)),
        exp_avg_sq(static_cast<bf16*>(m.exp_avg_sq.values)),
        max_exp_avg_sq(static_cast<bf16*>(m.max_exp_avg_sq.values)) {}

  template <int N>
  struct Held {
    Pack<bf16, N> exp_avg;
    Pack<bf16, N> exp_avg_sq;
    Pack<bf16, N> largest;
    __device__ __forceinline__ void get(int i, AdamLanes<ScalarLane<float>>& at) const {
      at.exp_avg.x = bf16_to_float(exp_avg.at[i]);
      at.exp_avg_sq.x = bf16_to_float(exp_avg_sq.at[i]);
      at.max_exp_avg_sq.x = bf16_to_float(largest.at[i]);
    }
    __device__ __forceinline__ void set(int i, const AdamLanes<ScalarLane<float>>& at, const Folded<float>& folded,
                                        int64_t element) {
      const uint32_t bits = random_bits(folded.random_key, element + folded.param_shift);
      exp_avg.at[i] = float_to_bf16_stochastic(at.exp_avg.x, bits);
      exp_avg_sq.at[i] = float_to_bf16_stochastic(at.exp_avg_sq.x, bits >> 16);
      largest.at[i] = float_to_bf16_stochastic(at.max_exp_avg_sq.x, bits >> 16);
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

}  // namespace

int adam_bf16(const AdamShards& shards, Stream stream) {
  return with_param(shards.elements(), [&](auto where, auto grad) {
    return launch_adam<typename decltype(where)::type, Bf16Moments, typename decltype(grad)::type>(shards, stream);
  });
}

}  // namespace zx::cuda
