// N neighbouring elements in registers, moved in accesses of up to 16 bytes.
#pragma once

#include <cstdint>

#include "cuda/device.cuh"

namespace zx::cuda {

constexpr int kAccessBytes = 16;

template <class T, int N>
struct Pack {
  T at[N];
};

template <class T, int N>
struct Accesses {
  static constexpr int kBytes = N * sizeof(T) < kAccessBytes ? N * sizeof(T) : kAccessBytes;
  static constexpr int kCount = N * sizeof(T) / kBytes;
  static constexpr int kElements = N / kCount;
  static_assert(kCount * kElements == N && (kBytes & (kBytes - 1)) == 0);
  struct alignas(kBytes) Access {
    T at[kElements];
  };
};

// `from` must be a multiple of the access size.
template <int N, class T>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  using A = Accesses<T, N>;
  Pack<T, N> pack;
  ZX_UNROLL
  for (int i = 0; i < A::kCount; ++i) {
    const typename A::Access access = reinterpret_cast<const typename A::Access*>(from)[i];
    ZX_UNROLL
    for (int j = 0; j < A::kElements; ++j) pack.at[i * A::kElements + j] = access.at[j];
  }
  return pack;
}

template <int N, class T>
__device__ __forceinline__ void store(const Pack<T, N>& pack, T* to) {
  using A = Accesses<T, N>;
  ZX_UNROLL
  for (int i = 0; i < A::kCount; ++i) {
    typename A::Access access;
    ZX_UNROLL
    for (int j = 0; j < A::kElements; ++j) access.at[j] = pack.at[i * A::kElements + j];
    reinterpret_cast<typename A::Access*>(to)[i] = access;
  }
}

template <int kBytes = kAccessBytes>
__host__ __device__ __forceinline__ bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kBytes == 0;
}

}  // namespace zx::cuda
