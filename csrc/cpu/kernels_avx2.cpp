// The CPU kernels with AVX2, FMA and F16C. See Note [One kernel source, three instruction sets] in kernels.h.
#if defined(__x86_64__)
#include <immintrin.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define ZX_SIMD_AVX2
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
#include "cpu/update_kernel.h"
#include "cpu/cast_kernel.h"
#include "cpu/norm_kernel.h"
#include "cpu/reduce_kernel.h"
// clang-format on
}  // namespace

const KernelTable& kernels_avx2() {
  static constexpr KernelTable table{"avx2", cast, update, reduce, norm};
  return table;
}

}  // namespace zx
#pragma GCC pop_options
#endif
