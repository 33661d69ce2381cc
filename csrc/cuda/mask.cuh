// What a mask does to elements in registers, see Note [Masks].
#pragma once

#include "cuda/device.cuh"
#include "math/kept_bits.h"
#include "math/rule.h"
#include "math/scalar_lane.h"

namespace zx::cuda {

// Calls body(j) for each of `count` neighbours (at most N, which lie in one byte of the mask) that is masked, the first
// being element i.
template <int N, class Body>
__device__ __forceinline__ void for_each_masked(const uint8_t* mask, int64_t i, int count, const Body& body) {
  static_assert(N <= 8);
  if (mask == nullptr || count == 0) return;
  const unsigned kept = KeptBits{mask}.neighbours(i);
  ZX_UNROLL
  for (int j = 0; j < N; ++j) {
    if ((kept >> j & 1u) == 0) body(j);
  }
}

// After their update.
template <int N, class T, int kStates>
__device__ __forceinline__ void clear_masked(const uint8_t* mask, int64_t i, Lanes<ScalarLane<T>, kStates> (&lanes)[N],
                                             int count = N) {
  for_each_masked<N>(mask, i, count, [&](int j) { lanes[j] = {}; });
}

}  // namespace zx::cuda
