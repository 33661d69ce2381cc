// Attributes that let one source serve a CUDA lane, a SIMD vector and a scalar tail.
#pragma once

#if defined(__CUDACC__)
#define ZX_HD __host__ __device__ __forceinline__
#else
// always_inline, not inline: these functions are compiled once per instruction set, and an out-of-line copy made for a
// newer one could be the copy that the linker keeps for all.
#define ZX_HD inline __attribute__((always_inline))
#endif
