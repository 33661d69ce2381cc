// N neighbouring elements in registers, moved in accesses of up to 16 bytes.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/device.cuh"

namespace zx::cuda {

constexpr int kAccessBytes = 16;

template <class T, int N>
struct Pack {
  T at[N];
};

// The type for one access of kBytes bytes.
template <int kBytes>
struct Word;
template <>
struct Word<16> {
  using Type = Word16;
};
template <>
struct Word<8> {
  using Type = Word8;
};
template <>
struct Word<4> {
  using Type = Word4;
};
template <>
struct Word<2> {
  using Type = Word2;
};

template <class T, int N>
struct Accesses {
  static constexpr int kBytes = static_cast<int>(N * sizeof(T) < kAccessBytes ? N * sizeof(T) : kAccessBytes);
  static constexpr int kCount = static_cast<int>(N * sizeof(T)) / kBytes;
  static constexpr int kElements = N / kCount;
  static_assert(kCount * kElements == N);
  using Word = typename cuda::Word<kBytes>::Type;
};

// For data that is not read again in this step: gradients, masters, states. Parameters are soon gathered.
constexpr bool kOnce = true;

// `from` must be a multiple of the access size.
template <int N, bool kStreaming = false, class T>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  using A = Accesses<T, N>;
  Pack<T, N> pack;
  ZX_UNROLL
  for (int i = 0; i < A::kCount; ++i) {
    const auto* at = reinterpret_cast<const typename A::Word*>(from) + i;
    const typename A::Word word = kStreaming ? load_streaming(at) : *at;
    memcpy(&pack.at[i * A::kElements], &word, sizeof(word));
  }
  return pack;
}

enum class Stores : uint8_t {
  any,        // to any memory
  whole,      // to the device's memory: one access, where the compiler might make several
  streaming,  // the same, for data that is not read again in this step
};

template <Stores kKind = Stores::any, int N, class T>
__device__ __forceinline__ void store(const Pack<T, N>& pack, T* to) {
  using A = Accesses<T, N>;
  ZX_UNROLL
  for (int i = 0; i < A::kCount; ++i) {
    typename A::Word word;
    memcpy(&word, &pack.at[i * A::kElements], sizeof(word));
    auto* at = reinterpret_cast<typename A::Word*>(to) + i;
    if constexpr (kKind == Stores::any) {
      *at = word;
    } else if constexpr (kKind == Stores::whole) {
      store_whole(at, word);
    } else {
      store_streaming(at, word);
    }
  }
}

// The first `count` of N elements, one by one; the others are zero.
template <int N, class T>
__device__ __forceinline__ Pack<T, N> load_first(const T* from, int count) {
  Pack<T, N> pack{};
  ZX_UNROLL
  for (int i = 0; i < N; ++i) {
    if (i < count) pack.at[i] = from[i];
  }
  return pack;
}

template <int N, class T>
__device__ __forceinline__ void store_first(const Pack<T, N>& pack, T* to, int count) {
  ZX_UNROLL
  for (int i = 0; i < N; ++i) {
    if (i < count) to[i] = pack.at[i];
  }
}

template <int kBytes = kAccessBytes>
__host__ __device__ __forceinline__ bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kBytes == 0;
}

}  // namespace zx::cuda
