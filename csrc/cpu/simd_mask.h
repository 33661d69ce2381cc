// Lanes that a mask keeps, see Note [Masks]: the others become +0. Bit l of `bits` is lane l's. Included by
// kernels_<isa>.cpp only.

#if defined(ZX_SIMD_AVX512)

ZX_HD VecF keep_lanes(VecF a, uint32_t bits) { return {_mm512_maskz_mov_ps(static_cast<__mmask16>(bits), a.x)}; }
ZX_HD VecD keep_lanes(VecD a, uint32_t bits) { return {_mm512_maskz_mov_pd(static_cast<__mmask8>(bits), a.x)}; }

#elif defined(ZX_SIMD_AVX2)

ZX_HD VecF keep_lanes(VecF a, uint32_t bits) {
  const __m256i own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
  return {_mm256_and_ps(a.x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, own), own)))};
}
ZX_HD VecD keep_lanes(VecD a, uint32_t bits) {
  const __m256i own = _mm256_setr_epi64x(1, 2, 4, 8);
  const __m256i all = _mm256_set1_epi64x(bits);
  return {_mm256_and_pd(a.x, _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_and_si256(all, own), own)))};
}

#endif

template <class T>
ZX_HD ScalarLane<T> keep_lanes(ScalarLane<T> a, uint32_t bits) {
  return {(bits & 1u) != 0 ? a.x : T(0)};
}

template <class V, int N>
ZX_HD void keep_lanes(Lanes<V, N>& lanes, uint32_t bits) {
  lanes.param = keep_lanes(lanes.param, bits);
  for_each_state<N>([&](auto s) ZX_LAMBDA { lanes.state[s.value] = keep_lanes(lanes.state[s.value], bits); });
}
