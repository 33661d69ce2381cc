// Attributes that let one source serve a CUDA lane, a SIMD vector and a scalar tail.
#pragma once

#if defined(__CUDACC__)
#define ZX_HD __host__ __device__ __forceinline__
#else
// always_inline, not inline: these functions are compiled once per instruction set, and an out-of-line copy made for a
// newer one could be the copy that the linker keeps for all.
#define ZX_HD inline __attribute__((always_inline))
#endif

// To be written before a ZX_HD template that calls a body it is given: the body may be for the host or the device
// alone.
#if defined(__CUDACC__)
#define ZX_FOR_ANY_BODY _Pragma("nv_exec_check_disable")
#else
#define ZX_FOR_ANY_BODY
#endif
