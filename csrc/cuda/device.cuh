// What the kernels need from CUDA beside its language, and the one place that launches them.
//
// Note [Kernels that run on the host]
// Tests compile the same .cu files with a C++ compiler. Then cuda_on_host.h (tests/cpp) stands in for the code below:
// every thread of a block is a fiber, barriers really wait, and fibers run in any order between them. So kernels use
// launch(), ZX_SHARED, __syncthreads, __syncwarp, shuffles, votes and atomics, and nothing else from CUDA.
#pragma once

#include <cstdint>

#include "cuda/kernels.h"

namespace zx::cuda {
constexpr int kThreads = 256;  // in a block
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;
}  // namespace zx::cuda

#if defined(__CUDACC__)

#include <cuda_runtime.h>

// Aligned for one full access: an array of floats by itself is not.
#define ZX_SHARED(type, name) __shared__ __align__(16) type name
// A kernel's parameter that is read where the launch put it, and not copied by each thread.
#define ZX_GRID_CONSTANT __grid_constant__
#define ZX_UNROLL _Pragma("unroll")
#define ZX_UNROLL_TWICE _Pragma("unroll 2")

namespace zx::cuda {

// The words that one instruction loads or stores, whatever the elements are.
using Word16 = uint4;
using Word8 = uint2;
using Word4 = unsigned;
using Word2 = unsigned short;

// For data that is read or written once in a step, and so need not stay in the cache.
template <class Word>
__device__ __forceinline__ Word load_streaming(const Word* from) {
  return __ldcs(from);
}
template <class Word>
__device__ __forceinline__ void store_streaming(Word* to, Word word) {
  __stcs(to, word);
}
// Like any store, but surely one access: through a pointer from an array, the compiler makes one access for each
// element.
__device__ __forceinline__ void store_whole(Word16* to, Word16 word) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}
__device__ __forceinline__ void store_whole(Word8* to, Word8 word) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(word.x), "r"(word.y) : "memory");
}
template <class Word>
__device__ __forceinline__ void store_whole(Word* to, Word word) {
  *to = word;
}

// The results are right to within a unit in the last place. Subnormal operands count as 0.
__device__ __forceinline__ float approximate_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float approximate_rsqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// For all the compiler knows, a pointer that was read from a table could lead anywhere. It leads to the device's
// memory.
template <class T>
__device__ __forceinline__ const T* in_global(const T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// Runs `kernel` on as many blocks as the device holds at a time, or on fewer if there are fewer tiles of work.
template <class Args>
cudaError_t launch(void (*kernel)(Args), int64_t num_tiles, Stream stream, const Args& args) {
  if (num_tiles <= 0) return cudaSuccess;
  int num_processors = 0;
  int blocks_each = 0;
  cudaError_t error = cudaSetDevice(stream.device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, stream.device);
  }
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, kernel, kThreads, 0);
  if (error != cudaSuccess) return error;
  const int64_t most = int64_t{num_processors} * blocks_each;
  kernel<<<static_cast<unsigned>(num_tiles < most ? num_tiles : most), kThreads, 0, stream.handle>>>(args);
  return cudaGetLastError();
}

}  // namespace zx::cuda

#else
#include "cuda_on_host.h"
#endif

namespace zx::cuda {

// This block's part of the tiles. They are adjacent, so that a look-up for one serves the next.
struct TileRange {
  int64_t first;
  int64_t last;
};
__device__ __forceinline__ TileRange tiles_of_block(int64_t num_tiles) {
  const int64_t blocks = gridDim.x;
  const int64_t each = num_tiles / blocks;
  const int64_t rest = num_tiles % blocks;  // the first blocks take one more
  const int64_t block = blockIdx.x;
  const int64_t first = block * each + (block < rest ? block : rest);
  return {first, first + each + (block < rest ? 1 : 0)};
}

constexpr int64_t tiles_for(int64_t numel, int64_t tile_numel) { return (numel + tile_numel - 1) / tile_numel; }

}  // namespace zx::cuda
