// Vectors of float and double with the interface of ScalarLane (math/scalar_lane.h), for one instruction set.
//
// Included once by each kernels_<isa>.cpp, inside that file's target pragma and namespace: see Note [One kernel
// source, three instruction sets] in kernels.h. Loads and stores convert from and to the storage formats; every
// arithmetic operation is one correctly rounded IEEE operation, so all instruction sets give the same bits.

#if defined(ZX_SIMD_AVX512) || defined(ZX_SIMD_AVX2)
#define ZX_HAS_VECTORS
#endif

#if defined(ZX_SIMD_AVX512)

struct VecF {
  using Scalar = float;
  static constexpr int kLanes = 16;
  __m512 x;

  static ZX_HD VecF splat(float value) { return {_mm512_set1_ps(value)}; }
  static ZX_HD VecF load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static ZX_HD VecF load(const bf16* p) { return {widen(bits16(p))}; }
  static ZX_HD VecF load(const f16* p) { return {_mm512_cvtph_ps(bits16(p))}; }
  ZX_HD void store(float* p) const { _mm512_storeu_ps(p, x); }
  ZX_HD void store(bf16* p) const { put16(p, round_bf16(x)); }
  ZX_HD void store(f16* p) const { put16(p, round_f16(x)); }

  static ZX_HD VecF load_split(const bf16* param, const int16_t* remainder) {
    const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits16(param)), 16);
    const __m512 joined = _mm512_castsi512_ps(_mm512_add_epi32(upper, _mm512_cvtepi16_epi32(bits16(remainder))));
    const __mmask16 nan = _mm512_cmp_ps_mask(joined, joined, _CMP_UNORD_Q);
    return {_mm512_mask_blend_ps(nan, joined, _mm512_castsi512_ps(upper))};
  }
  ZX_HD void store_split(bf16* param, int16_t* remainder) const {
    const __m512i bits = _mm512_castps_si512(x);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    // No carry gets lost: the upper half of a number that is not NaN is at most 0xff80.
    const __m512i up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
    const __m512i sign = _mm512_andnot_si512(_mm512_set1_epi32(0x7fffffff), bits);
    const __m512i quiet = _mm512_or_si512(sign, _mm512_set1_epi32(0x7fc00000));
    put16(param, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, up, quiet), 16)));
    put16(remainder, _mm512_cvtepi32_epi16(_mm512_maskz_mov_epi32(static_cast<__mmask16>(~nan), bits)));
  }
  static ZX_HD VecF load_master(const bf16* param, const float* master) {
    const __m512 kept = _mm512_loadu_ps(master);
    const __m256i now = bits16(param);
    const __mmask16 same = _mm256_cmpeq_epi16_mask(round_bf16(kept), now);
    return {_mm512_mask_blend_ps(same, widen(now), kept)};
  }
  static ZX_HD VecF load_master(const f16* param, const float* master) {
    const __m512 kept = _mm512_loadu_ps(master);
    const __m256i now = bits16(param);
    const __mmask16 same = _mm256_cmpeq_epi16_mask(round_f16(kept), now);
    return {_mm512_mask_blend_ps(same, _mm512_cvtph_ps(now), kept)};
  }

  static ZX_HD __m256i bits16(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static ZX_HD void put16(void* p, __m256i bits) { _mm256_storeu_si256(static_cast<__m256i*>(p), bits); }
  static ZX_HD __m512 widen(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static ZX_HD __m256i round_bf16(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i bias = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(high, _mm512_set1_epi32(1)));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet));
  }
  static ZX_HD __m256i round_f16(__m512 value) {
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
};
ZX_HD VecF operator+(VecF a, VecF b) { return {_mm512_add_ps(a.x, b.x)}; }
ZX_HD VecF operator-(VecF a, VecF b) { return {_mm512_sub_ps(a.x, b.x)}; }
ZX_HD VecF operator*(VecF a, VecF b) { return {_mm512_mul_ps(a.x, b.x)}; }
ZX_HD VecF operator/(VecF a, VecF b) { return {_mm512_div_ps(a.x, b.x)}; }
ZX_HD VecF fma(VecF a, VecF b, VecF c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
ZX_HD VecF sqrt(VecF a) { return {_mm512_sqrt_ps(a.x)}; }
ZX_HD VecF max(VecF a, VecF b) { return {_mm512_max_ps(a.x, b.x)}; }
ZX_HD VecF min(VecF a, VecF b) { return {_mm512_min_ps(a.x, b.x)}; }
ZX_HD VecF sign(VecF a) {
  const __m512 zero = _mm512_setzero_ps();
  const __m512 one = _mm512_or_ps(_mm512_and_ps(a.x, _mm512_set1_ps(-0.0f)), _mm512_set1_ps(1.0f));
  const __mmask16 unequal = _mm512_cmp_ps_mask(a.x, zero, _CMP_NEQ_OQ);
  return {_mm512_mask_blend_ps(unequal, _mm512_add_ps(a.x, zero), one)};
}

struct VecD {
  using Scalar = double;
  static constexpr int kLanes = 8;
  __m512d x;

  static ZX_HD VecD splat(double value) { return {_mm512_set1_pd(value)}; }
  static ZX_HD VecD load(const double* p) { return {_mm512_loadu_pd(p)}; }
  static ZX_HD VecD load(const float* p) { return {_mm512_cvtps_pd(_mm256_loadu_ps(p))}; }
  static ZX_HD VecD load(const bf16* p) {
    const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits16(p)), 16);
    return {_mm512_cvtps_pd(_mm256_castsi256_ps(wide))};
  }
  static ZX_HD VecD load(const f16* p) { return {_mm512_cvtps_pd(_mm256_cvtph_ps(bits16(p)))}; }
  ZX_HD void store(double* p) const { _mm512_storeu_pd(p, x); }
  ZX_HD void store(float* p) const { _mm256_storeu_ps(p, _mm512_cvtpd_ps(x)); }
  ZX_HD void store(bf16* p) const { store_each(p); }
  ZX_HD void store(f16* p) const { store_each(p); }

  template <class H>
  ZX_HD void store_each(H* p) const {
    alignas(64) double lanes[kLanes];
    store(lanes);
    for (int i = 0; i < kLanes; ++i) ScalarLane<double>{lanes[i]}.store(p + i);
  }
  static ZX_HD __m128i bits16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
};
ZX_HD VecD operator+(VecD a, VecD b) { return {_mm512_add_pd(a.x, b.x)}; }
ZX_HD VecD operator-(VecD a, VecD b) { return {_mm512_sub_pd(a.x, b.x)}; }
ZX_HD VecD operator*(VecD a, VecD b) { return {_mm512_mul_pd(a.x, b.x)}; }
ZX_HD VecD operator/(VecD a, VecD b) { return {_mm512_div_pd(a.x, b.x)}; }
ZX_HD VecD fma(VecD a, VecD b, VecD c) { return {_mm512_fmadd_pd(a.x, b.x, c.x)}; }
ZX_HD VecD sqrt(VecD a) { return {_mm512_sqrt_pd(a.x)}; }
ZX_HD VecD max(VecD a, VecD b) { return {_mm512_max_pd(a.x, b.x)}; }
ZX_HD VecD sign(VecD a) {
  const __m512d zero = _mm512_setzero_pd();
  const __m512d one = _mm512_or_pd(_mm512_and_pd(a.x, _mm512_set1_pd(-0.0)), _mm512_set1_pd(1.0));
  const __mmask8 unequal = _mm512_cmp_pd_mask(a.x, zero, _CMP_NEQ_OQ);
  return {_mm512_mask_blend_pd(unequal, _mm512_add_pd(a.x, zero), one)};
}

#elif defined(ZX_SIMD_AVX2)

struct VecF {
  using Scalar = float;
  static constexpr int kLanes = 8;
  __m256 x;

  static ZX_HD VecF splat(float value) { return {_mm256_set1_ps(value)}; }
  static ZX_HD VecF load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static ZX_HD VecF load(const bf16* p) {  // one shuffle, where widen() takes two and a shift
    const __m256i twice = _mm256_broadcastsi128_si256(bits16(p));
    const __m256i into_upper_halves = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                                       -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
    return {_mm256_castsi256_ps(_mm256_shuffle_epi8(twice, into_upper_halves))};
  }
  static ZX_HD VecF load(const f16* p) { return {_mm256_cvtph_ps(bits16(p))}; }
  ZX_HD void store(float* p) const { _mm256_storeu_ps(p, x); }
  ZX_HD void store(bf16* p) const { put16(p, round_bf16(x)); }
  ZX_HD void store(f16* p) const { put16(p, round_f16(x)); }

  static ZX_HD VecF load_split(const bf16* param, const int16_t* remainder) {
    const __m256i upper = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits16(param)), 16);
    const __m256 joined = _mm256_castsi256_ps(_mm256_add_epi32(upper, _mm256_cvtepi16_epi32(bits16(remainder))));
    const __m256 nan = _mm256_cmp_ps(joined, joined, _CMP_UNORD_Q);
    return {_mm256_blendv_ps(joined, _mm256_castsi256_ps(upper), nan)};
  }
  ZX_HD void store_split(bf16* param, int16_t* remainder) const {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    // No carry gets lost: the upper half of a number that is not NaN is at most 0xff80.
    const __m256i up = _mm256_add_epi32(bits, _mm256_set1_epi32(0x8000));
    const __m256i sign = _mm256_andnot_si256(_mm256_set1_epi32(0x7fffffff), bits);
    const __m256i quiet = _mm256_or_si256(sign, _mm256_set1_epi32(0x7fc00000));
    // Takes the parameter's half from `up` and the remainder's half from `bits`, then puts each half of all eight
    // together.
    const __m256i both = _mm256_blendv_epi8(_mm256_blend_epi16(bits, up, 0xaa), quiet, nan);
    const __m256i halves = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                            0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m256i split = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(both, halves), 0xd8);
    put16(remainder, _mm256_castsi256_si128(split));
    put16(param, _mm256_extracti128_si256(split, 1));
  }
  static ZX_HD VecF load_master(const bf16* param, const float* master) {
    const __m256 kept = _mm256_loadu_ps(master);
    const __m128i now = bits16(param);
    return {_mm256_blendv_ps(widen(now), kept, same(round_bf16(kept), now))};
  }
  static ZX_HD VecF load_master(const f16* param, const float* master) {
    const __m256 kept = _mm256_loadu_ps(master);
    const __m128i now = bits16(param);
    return {_mm256_blendv_ps(_mm256_cvtph_ps(now), kept, same(round_f16(kept), now))};
  }

  static ZX_HD __m128i bits16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static ZX_HD void put16(void* p, __m128i bits) { _mm_storeu_si128(static_cast<__m128i*>(p), bits); }
  static ZX_HD __m256 widen(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static ZX_HD __m128i narrow16(__m256i wide) {  // values below 2^16
    return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  }
  static ZX_HD __m256 same(__m128i a, __m128i b) {
    return _mm256_castsi256_ps(_mm256_cvtepi16_epi32(_mm_cmpeq_epi16(a, b)));
  }
  static ZX_HD __m128i round_bf16(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(bits, 16);
    const __m256i bias = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(high, _mm256_set1_epi32(1)));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    return narrow16(_mm256_blendv_epi8(rounded, quiet, nan));
  }
  static ZX_HD __m128i round_f16(__m256 value) {
    return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
};
ZX_HD VecF operator+(VecF a, VecF b) { return {_mm256_add_ps(a.x, b.x)}; }
ZX_HD VecF operator-(VecF a, VecF b) { return {_mm256_sub_ps(a.x, b.x)}; }
ZX_HD VecF operator*(VecF a, VecF b) { return {_mm256_mul_ps(a.x, b.x)}; }
ZX_HD VecF operator/(VecF a, VecF b) { return {_mm256_div_ps(a.x, b.x)}; }
ZX_HD VecF fma(VecF a, VecF b, VecF c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
ZX_HD VecF sqrt(VecF a) { return {_mm256_sqrt_ps(a.x)}; }
ZX_HD VecF max(VecF a, VecF b) { return {_mm256_max_ps(a.x, b.x)}; }
ZX_HD VecF min(VecF a, VecF b) { return {_mm256_min_ps(a.x, b.x)}; }
ZX_HD VecF sign(VecF a) {
  const __m256 zero = _mm256_setzero_ps();
  const __m256 one = _mm256_or_ps(_mm256_and_ps(a.x, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(1.0f));
  const __m256 unequal = _mm256_cmp_ps(a.x, zero, _CMP_NEQ_OQ);
  return {_mm256_blendv_ps(_mm256_add_ps(a.x, zero), one, unequal)};
}

struct VecD {
  using Scalar = double;
  static constexpr int kLanes = 4;
  __m256d x;

  static ZX_HD VecD splat(double value) { return {_mm256_set1_pd(value)}; }
  static ZX_HD VecD load(const double* p) { return {_mm256_loadu_pd(p)}; }
  static ZX_HD VecD load(const float* p) { return {_mm256_cvtps_pd(_mm_loadu_ps(p))}; }
  static ZX_HD VecD load(const bf16* p) { return load_each(p); }
  static ZX_HD VecD load(const f16* p) { return load_each(p); }
  ZX_HD void store(double* p) const { _mm256_storeu_pd(p, x); }
  ZX_HD void store(float* p) const { _mm_storeu_ps(p, _mm256_cvtpd_ps(x)); }
  ZX_HD void store(bf16* p) const { store_each(p); }
  ZX_HD void store(f16* p) const { store_each(p); }

  template <class H>
  static ZX_HD VecD load_each(const H* p) {
    alignas(32) double lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = ScalarLane<double>::load(p + i).x;
    return load(lanes);
  }
  template <class H>
  ZX_HD void store_each(H* p) const {
    alignas(32) double lanes[kLanes];
    store(lanes);
    for (int i = 0; i < kLanes; ++i) ScalarLane<double>{lanes[i]}.store(p + i);
  }
};
ZX_HD VecD operator+(VecD a, VecD b) { return {_mm256_add_pd(a.x, b.x)}; }
ZX_HD VecD operator-(VecD a, VecD b) { return {_mm256_sub_pd(a.x, b.x)}; }
ZX_HD VecD operator*(VecD a, VecD b) { return {_mm256_mul_pd(a.x, b.x)}; }
ZX_HD VecD operator/(VecD a, VecD b) { return {_mm256_div_pd(a.x, b.x)}; }
ZX_HD VecD fma(VecD a, VecD b, VecD c) { return {_mm256_fmadd_pd(a.x, b.x, c.x)}; }
ZX_HD VecD sqrt(VecD a) { return {_mm256_sqrt_pd(a.x)}; }
ZX_HD VecD max(VecD a, VecD b) { return {_mm256_max_pd(a.x, b.x)}; }
ZX_HD VecD sign(VecD a) {
  const __m256d zero = _mm256_setzero_pd();
  const __m256d one = _mm256_or_pd(_mm256_and_pd(a.x, _mm256_set1_pd(-0.0)), _mm256_set1_pd(1.0));
  const __m256d unequal = _mm256_cmp_pd(a.x, zero, _CMP_NEQ_OQ);
  return {_mm256_blendv_pd(_mm256_add_pd(a.x, zero), one, unequal)};
}

#else

using VecF = ScalarLane<float>;
using VecD = ScalarLane<double>;

#endif

template <class T>
struct VecOf;
template <>
struct VecOf<float> {
  using type = VecF;
};
template <>
struct VecOf<double> {
  using type = VecD;
};
template <class T>
using Vec = typename VecOf<T>::type;

// Calls body(V{}, i) over [0, numel): whole vectors first, then single lanes.
template <class T, class Body>
ZX_HD void for_each_vector(int64_t numel, Body body) {
  int64_t i = 0;
  for (; i + Vec<T>::kLanes <= numel; i += Vec<T>::kLanes) body(Vec<T>{}, i);
  for (; i < numel; ++i) body(ScalarLane<T>{}, i);
}
