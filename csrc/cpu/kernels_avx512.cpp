// The CPU kernels with AVX-512 F, BW, VL, DQ, and a second table of them for CPUs that also have VBMI. See Note [One
// kernel source, three instruction sets] in kernels.h.
#if defined(__x86_64__)
#include <immintrin.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

// GCC 12 mistakes the don't-care operand inside its own intrinsics for a use of an uninitialized variable (PR 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define ZX_SIMD_AVX512
// clang-format off: our headers come after the pragma, in this order
#include "cpu/kernels.h"
#include "math/dynamic_map.h"
#include "math/exact_sum.h"
#include "math/map_arithmetic.h"
#include "math/random.h"
#include "math/scalar_lane.h"

#define ZX_LAMBDA __attribute__((always_inline))
namespace zx {
namespace {
#include "cpu/simd.h"
#include "cpu/simd_int.h"
#include "cpu/simd_state.h"
#include "cpu/simd_mask.h"
#include "cpu/simd_map.h"
#include "cpu/state.h"
#pragma GCC push_options
#pragma GCC target("avx512vbmi")
#include "cpu/map_vbmi.h"
template <bool kHasNegatives>
__attribute__((noinline)) void decode_blocks_vbmi(const uint8_t* codes, const float* scales, int64_t numel,
                                                  float* values) {
  for (int64_t i = 0; i < numel; i += kStateBlock) {
    decode_block_vbmi<kHasNegatives>(codes + i, scales[i / kStateBlock], values + i);
  }
}
constexpr Decoders kDecodersVbmi{{decode_blocks_vbmi<false>, decode_blocks_vbmi<true>}};
#pragma GCC pop_options
#include "cpu/update_kernel.h"
#include "cpu/cast_kernel.h"
#include "cpu/norm_kernel.h"
#include "cpu/reduce_kernel.h"
// clang-format on

void update_vbmi(const UpdateSpan& span, const void* step) { update_by({span, kDecodersVbmi}, step); }

}  // namespace

const KernelTable& kernels_avx512() {
  static constexpr KernelTable table{"avx512", cast, update, reduce, norm};
  return table;
}

const KernelTable& kernels_avx512vbmi() {
  static constexpr KernelTable table{"avx512vbmi", cast, update_vbmi, reduce, norm};
  return table;
}

}  // namespace zx
#pragma GCC pop_options
#endif
