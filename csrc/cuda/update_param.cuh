// These know where a parameter's exact value lies. They hold N values in registers, in the type of the arithmetic.
#pragma once

#include <type_traits>

#include "cuda/device.cuh"
#include "cuda/kernels.h"
#include "cuda/pack.cuh"
#include "math/rule.h"
#include "math/scalar_lane.h"

namespace zx::cuda {

template <class Param>
struct PlainParam {
  using Value = std::conditional_t<std::is_same_v<Param, double>, double, float>;
  static constexpr int kNarrowestBytes = sizeof(Param);
  Param* param = nullptr;

  PlainParam() = default;
  explicit PlainParam(const UpdateElements& e) : param(static_cast<Param*>(e.param)) {}

  template <int N>
  struct Loaded {
    Pack<Param, N> param;
    __device__ __forceinline__ Value get(int i) const { return ScalarLane<Value>::load(&param.at[i]).x; }
    __device__ __forceinline__ void set(int i, Value value) { ScalarLane<Value>{value}.store(&param.at[i]); }
  };
  template <int N>
  __device__ __forceinline__ Loaded<N> load(int64_t i) const {
    return {cuda::load<N>(param + i)};
  }
  template <int N, class Span>
  __device__ __forceinline__ Loaded<N> load(const Span& span) const {
    return {span.load(param)};
  }
  template <int N>
  __device__ __forceinline__ void store(const Loaded<N>& loaded, int64_t i) const {
    cuda::store<Stores::whole>(loaded.param, param + i);
  }
  template <int N, class Span>
  __device__ __forceinline__ void store(const Loaded<N>& loaded, const Span& span) const {
    span.template store<Stores::whole>(loaded.param, param);
  }
};

struct SplitParam {
  using Value = float;
  static constexpr int kNarrowestBytes = sizeof(bf16);
  bf16* param = nullptr;
  int16_t* remainder = nullptr;

  SplitParam() = default;
  explicit SplitParam(const UpdateElements& e)
      : param(static_cast<bf16*>(e.param)), remainder(static_cast<int16_t*>(e.master)) {}

  template <int N>
  struct Loaded {
    Pack<bf16, N> param;
    Pack<int16_t, N> remainder;
    __device__ __forceinline__ float get(int i) const {
      return ScalarLane<float>::load_split(&param.at[i], &remainder.at[i]).x;
    }
    __device__ __forceinline__ void set(int i, float value) {
      ScalarLane<float>{value}.store_split(&param.at[i], &remainder.at[i]);
    }
  };
  template <int N>
  __device__ __forceinline__ Loaded<N> load(int64_t i) const {
    return {cuda::load<N>(param + i), cuda::load<N, kOnce>(remainder + i)};
  }
  template <int N, class Span>
  __device__ __forceinline__ Loaded<N> load(const Span& span) const {
    return {span.load(param), span.template load<kOnce>(remainder)};
  }
  template <int N>
  __device__ __forceinline__ void store(const Loaded<N>& loaded, int64_t i) const {
    cuda::store<Stores::whole>(loaded.param, param + i);
    cuda::store<Stores::streaming>(loaded.remainder, remainder + i);
  }
  template <int N, class Span>
  __device__ __forceinline__ void store(const Loaded<N>& loaded, const Span& span) const {
    span.template store<Stores::whole>(loaded.param, param);
    span.template store<Stores::streaming>(loaded.remainder, remainder);
  }
};

template <class Half>
struct MasteredParam {
  using Value = float;
  static constexpr int kNarrowestBytes = sizeof(Half);
  Half* param = nullptr;
  float* master = nullptr;

  MasteredParam() = default;
  explicit MasteredParam(const UpdateElements& e)
      : param(static_cast<Half*>(e.param)), master(static_cast<float*>(e.master)) {}

  template <int N>
  struct Loaded {
    Pack<Half, N> param;
    Pack<float, N> master;
    __device__ __forceinline__ float get(int i) const {
      return ScalarLane<float>::load_master(&param.at[i], &master.at[i]).x;
    }
    __device__ __forceinline__ void set(int i, float value) {
      master.at[i] = value;
      ScalarLane<float>{value}.store(&param.at[i]);
    }
  };
  template <int N>
  __device__ __forceinline__ Loaded<N> load(int64_t i) const {
    return {cuda::load<N>(param + i), cuda::load<N, kOnce>(master + i)};
  }
  template <int N, class Span>
  __device__ __forceinline__ Loaded<N> load(const Span& span) const {
    return {span.load(param), span.template load<kOnce>(master)};
  }
  template <int N>
  __device__ __forceinline__ void store(const Loaded<N>& loaded, int64_t i) const {
    cuda::store<Stores::whole>(loaded.param, param + i);
    cuda::store<Stores::streaming>(loaded.master, master + i);
  }
  template <int N, class Span>
  __device__ __forceinline__ void store(const Loaded<N>& loaded, const Span& span) const {
    span.template store<Stores::whole>(loaded.param, param);
    span.template store<Stores::streaming>(loaded.master, master);
  }
};

// ---- from values that are known at run time to types: launch(type of Where, type of gradients)

template <class Where, class Launch>
int with_grad(const UpdateElements& e, const Launch& launch) {
  switch (e.grad_dtype) {
    case DType::f64:
      if constexpr (std::is_same_v<typename Where::Value, double>) return launch(Type<Where>{}, Type<double>{});
      break;  // refused at the door: 16- and 32-bit parameters have no fp64 gradients
    case DType::f32:
      return launch(Type<Where>{}, Type<float>{});
    case DType::bf16:
      return launch(Type<Where>{}, Type<bf16>{});
    case DType::f16:
      return launch(Type<Where>{}, Type<f16>{});
  }
  return cudaErrorInvalidValue;
}

template <class Half, class Launch>
int with_half(const UpdateElements& e, const Launch& launch) {
  if (e.master_kind == Master::fp32) return with_grad<MasteredParam<Half>>(e, launch);
  if constexpr (std::is_same_v<Half, bf16>) {
    if (e.master_kind == Master::remainder) return with_grad<SplitParam>(e, launch);
  }
  return with_grad<PlainParam<Half>>(e, launch);
}

// For parameters that are updated in fp32.
template <class Launch>
int with_param(const UpdateElements& e, const Launch& launch) {
  switch (e.param_dtype) {
    case DType::f64:
      break;
    case DType::f32:
      return with_grad<PlainParam<float>>(e, launch);
    case DType::bf16:
      return with_half<bf16>(e, launch);
    case DType::f16:
      return with_half<f16>(e, launch);
  }
  return cudaErrorInvalidValue;
}

}  // namespace zx::cuda
