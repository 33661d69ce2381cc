// Lanes that a mask keeps, see Note [Masks]: the others become +0. Kept<V>(kept, i) is of the lanes of a V from element
// i on, which is a multiple of 8 for vectors of floats. Included by kernels_<isa>.cpp only.

template <class V>
struct Kept;

struct KeepAll {
  template <class V>
  ZX_HD V operator()(V a) const {
    return a;
  }
};

#if defined(ZX_SIMD_AVX512)

template <>
struct Kept<VecF> {
  __mmask16 x;
  Kept() = default;
  ZX_HD Kept(KeptBits kept, int64_t i) : x(static_cast<__mmask16>(kept.bytes_of(i) >> kept.shift())) {}
  ZX_HD VecF operator()(VecF a) const { return {_mm512_maskz_mov_ps(x, a.x)}; }
  ZX_HD VecI operator()(VecI a) const { return {_mm512_maskz_mov_epi32(x, a.x)}; }
};
template <>
struct Kept<VecD> {
  __mmask8 x;
  ZX_HD Kept(KeptBits kept, int64_t i) : x(static_cast<__mmask8>(kept.word(i))) {}
  ZX_HD VecD operator()(VecD a) const { return {_mm512_maskz_mov_pd(x, a.x)}; }
};

#elif defined(ZX_SIMD_AVX2)

template <>
struct Kept<VecF> {
  __m256i x;
  Kept() = default;
  // The bits go from memory into all lanes, and each lane looks at its own: the same one for every i.
  ZX_HD Kept(KeptBits kept, int64_t i) {
    const __m256i first = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i own = _mm256_sll_epi32(first, _mm_cvtsi32_si128(static_cast<int>(kept.shift())));
    const __m256i all = _mm256_set1_epi32(static_cast<int>(kept.bytes_of(i)));
    x = _mm256_cmpeq_epi32(_mm256_and_si256(all, own), own);
  }
  ZX_HD VecF operator()(VecF a) const { return {_mm256_and_ps(a.x, _mm256_castsi256_ps(x))}; }
  ZX_HD VecI operator()(VecI a) const { return {_mm256_and_si256(a.x, x)}; }
};
template <>
struct Kept<VecD> {
  __m256i x;
  ZX_HD Kept(KeptBits kept, int64_t i) {
    const __m256i own = _mm256_setr_epi64x(1, 2, 4, 8);
    x = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(kept.word(i)), own), own);
  }
  ZX_HD VecD operator()(VecD a) const { return {_mm256_and_pd(a.x, _mm256_castsi256_pd(x))}; }
};

#endif

template <class T>
struct Kept<ScalarLane<T>> {
  bool x;
  ZX_HD Kept(KeptBits kept, int64_t i) : x(kept.at(i)) {}
  ZX_HD ScalarLane<T> operator()(ScalarLane<T> a) const { return {x ? a.x : T(0)}; }
};

template <class V, int N>
ZX_HD void keep_states(Lanes<V, N>& lanes, const Kept<V>& kept) {
  for_each_state<N>([&](auto s) ZX_LAMBDA { lanes.state[s.value] = kept(lanes.state[s.value]); });
}
