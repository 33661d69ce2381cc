// The CPU kernels as a table of functions on raw pointers, one table for each instruction set.
//
// Note [One kernel source, three instruction sets]
// The same headers (simd.h, *_kernel.h) are compiled by kernels_scalar.cpp, kernels_avx2.cpp and kernels_avx512.cpp,
// each in a namespace of its own, under a target pragma instead of a compiler flag: the wheel then runs on any x86-64,
// and setuptools needs no flags per file. Standard headers are included before the pragma, ours after it, and every
// function of ours is always_inline or local to its file: code built for AVX-512 must never become the one copy of an
// inline function that the linker keeps for all.
#pragma once

#include <cstdint>

#include "math/dtype.h"
#include "math/kept_bits.h"
#include "math/norm.h"
#include "math/random.h"
#include "math/rules.h"
#include "math/state.h"

namespace zx {

// What the random bits of a step hang on: its key, and how many elements of the parameter come before.
struct RandomStart {
  int64_t param_start;
  RandomKey key;
};

// Elements [0, numel) of one parameter's part of a shard.
struct UpdateSpan {
  RuleKind rule;
  DType param_dtype;
  Master master_kind;
  DType grad_dtype;
  void* param;
  void* master;
  const void* grad;
  int num_states;
  StoredStates states;
  int64_t numel;
  RandomStart random;
  KeptBits kept;
};

// shard = round((slices[0] + slices[1] + ... in this order) / divisor [+ shard]) over [0, numel).
struct ReduceSpan {
  DType dtype;
  const void* const* slices;
  int64_t num_slices;
  double divisor;
  bool by_inverse;  // divides by a product with the inverse: see math/divisor.h
  bool accumulate;
  void* shard;
  int64_t numel;
};

struct KernelTable {
  const char* name;
  void (*cast)(DType from, const void* source, DType to, void* target, int64_t numel);
  // `step`: the Step<double> of the span's rule.
  void (*update)(const UpdateSpan& span, const void* step);
  // Both add to `limbs`, an exact sum: see Note [Norms are summed exactly].
  void (*reduce)(const ReduceSpan& span, int64_t* limbs);
  // For max_of_abs limbs[0] holds the bits of the largest |element| as a double.
  void (*norm)(Norm kind, DType dtype, const void* values, int64_t numel, KeptBits kept, int64_t* limbs);
};

const KernelTable& kernels_scalar();
#if defined(__x86_64__)
const KernelTable& kernels_avx2();
const KernelTable& kernels_avx512();
const KernelTable& kernels_avx512vbmi();  // the same but for the decoding of 8-bit states
#endif

}  // namespace zx
