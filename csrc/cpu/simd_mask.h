// Lanes that a mask keeps, see Note [Masks]: the others become +0. Kept<V>(kept, i) is of the lanes of a V from element
// i on, which is a multiple of 8 for vectors of floats. Included by kernels_<isa>.cpp only.

template <class V>
struct Kept;

#if defined(ZX_SIMD_AVX512)

template <>
struct Kept<VecF> {
  __mmask16 x;
  Kept() = default;
  ZX_HD Kept(KeptBits kept, int64_t i) : x(static_cast<__mmask16>(kept.bytes_of(i) >> kept.shift())) {}
  ZX_HD VecF operator()(VecF a) const { return {_mm512_maskz_mov_ps(x, a.x)}; }
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
  // The bits go from memory into all lanes, and each lane looks at its own: the same one for every i.
  ZX_HD Kept(KeptBits kept, int64_t i) {
    const __m256i first = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i own = _mm256_sll_epi32(first, _mm_cvtsi32_si128(static_cast<int>(kept.shift())));
    const __m256i all = _mm256_set1_epi32(static_cast<int>(kept.bytes_of(i)));
    x = _mm256_cmpeq_epi32(_mm256_and_si256(all, own), own);
  }
  ZX_HD VecF operator()(VecF a) const { return {_mm256_and_ps(a.x, _mm256_castsi256_ps(x))}; }
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

// ---- bf16

// Beside states in bf16 there is upper_halves(a) too: a >> 16, and 0 in the lanes that are cleared.
template <class V>
struct KeptBeside16Bits : Kept<V> {  // a constructor that is inherited has not the pragma's target
  ZX_HD KeptBeside16Bits(KeptBits kept, int64_t i) : Kept<V>(kept, i) {}
};
template <class V>
struct AllBeside16Bits {
  AllBeside16Bits() = default;
  ZX_HD AllBeside16Bits(KeptBits /*kept*/, int64_t /*i*/) {}
  ZX_HD V operator()(V a) const { return a; }
  template <class Bits>
  ZX_HD Bits upper_halves(Bits a) const {
    return a >> 16;
  }
};

#if defined(ZX_SIMD_AVX512)

template <>
struct KeptBeside16Bits<VecF> : Kept<VecF> {
  KeptBeside16Bits() = default;
  ZX_HD KeptBeside16Bits(KeptBits kept, int64_t i) : Kept<VecF>(kept, i) {}
  ZX_HD VecI upper_halves(VecI a) const { return {_mm512_maskz_srli_epi32(x, a.x, 16)}; }
};

#elif defined(ZX_SIMD_AVX2)

// What eight bits keep, for every eight. The arithmetic of Kept would keep units busy that rounding waits for, and
// loads don't. (Updates that wait for memory are slower with a table: it is driven out of the cache.)
struct KeptLanes {
  uint32_t ones[8];            // all ones where a lane is kept, else 0
  uint32_t shift_to_lower[8];  // 16 where a lane is kept, else 32: all its bits are shifted out
};
struct KeptLanesOfBits {
  alignas(64) KeptLanes of[256];
};
consteval KeptLanesOfBits make_kept_lanes() {
  KeptLanesOfBits made{};
  for (unsigned bits = 0; bits < 256; ++bits) {
    for (unsigned lane = 0; lane < 8; ++lane) {
      const bool kept = (bits >> lane & 1) != 0;
      made.of[bits].ones[lane] = kept ? 0xffffffff : 0;
      made.of[bits].shift_to_lower[lane] = kept ? 16 : 32;
    }
  }
  return made;
}
inline constexpr KeptLanesOfBits kKeptLanes = make_kept_lanes();

template <>
struct KeptBeside16Bits<VecF> {
  const KeptLanes* lanes;
  KeptBeside16Bits() = default;
  ZX_HD KeptBeside16Bits(KeptBits kept, int64_t i)
      : lanes(&kKeptLanes.of[static_cast<uint8_t>(kept.bytes_of(i) >> kept.shift())]) {}
  ZX_HD VecF operator()(VecF a) const { return (VecI::of(a) & VecI::load(lanes->ones)).as_float(); }
  ZX_HD VecI upper_halves(VecI a) const { return a >> VecI::load(lanes->shift_to_lower); }
};

#endif
