// Vectors of as many 32-bit integers as VecF has floats, for one instruction set, and what they do together. Included
// by kernels_<isa>.cpp only. There is none without SIMD.

#if defined(ZX_SIMD_AVX512)

struct Mask {
  __mmask16 x;
};
struct VecI {
  static constexpr int kLanes = VecF::kLanes;
  __m512i x;

  static ZX_HD VecI splat(uint32_t value) { return {_mm512_set1_epi32(static_cast<int32_t>(value))}; }
  static ZX_HD VecI lane_numbers() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
  static ZX_HD VecI of(VecF a) { return {_mm512_castps_si512(a.x)}; }
  ZX_HD VecF as_float() const { return {_mm512_castsi512_ps(x)}; }
  ZX_HD VecF to_float() const { return {_mm512_cvtepi32_ps(x)}; }
  ZX_HD void store_lower_halves(void* p) const { VecF::put16(p, _mm512_cvtepi32_epi16(x)); }
  static ZX_HD VecI load(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
  ZX_HD void store(uint32_t* p) const { _mm512_storeu_si512(p, x); }
  static ZX_HD VecI load(const uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
};
ZX_HD VecI operator+(VecI a, VecI b) { return {_mm512_add_epi32(a.x, b.x)}; }
ZX_HD VecI operator-(VecI a, VecI b) { return {_mm512_sub_epi32(a.x, b.x)}; }
ZX_HD VecI operator*(VecI a, uint32_t b) { return {_mm512_mullo_epi32(a.x, VecI::splat(b).x)}; }
ZX_HD VecI operator&(VecI a, VecI b) { return {_mm512_and_si512(a.x, b.x)}; }
ZX_HD VecI operator|(VecI a, VecI b) { return {_mm512_or_si512(a.x, b.x)}; }
ZX_HD VecI operator^(VecI a, VecI b) { return {_mm512_xor_si512(a.x, b.x)}; }
ZX_HD VecI operator<<(VecI a, VecI b) { return {_mm512_sllv_epi32(a.x, b.x)}; }
ZX_HD VecI operator>>(VecI a, VecI b) { return {_mm512_srlv_epi32(a.x, b.x)}; }
ZX_HD VecI operator<<(VecI a, int bits) { return {_mm512_slli_epi32(a.x, bits)}; }
ZX_HD VecI operator>>(VecI a, int bits) { return {_mm512_srli_epi32(a.x, bits)}; }
ZX_HD VecI min_unsigned(VecI a, VecI b) { return {_mm512_min_epu32(a.x, b.x)}; }
ZX_HD VecI max_unsigned(VecI a, VecI b) { return {_mm512_max_epu32(a.x, b.x)}; }
ZX_HD VecI abs(VecI a) { return {_mm512_abs_epi32(a.x)}; }
ZX_HD VecI min_signed(VecI a, VecI b) { return {_mm512_min_epi32(a.x, b.x)}; }
ZX_HD VecI max_signed(VecI a, VecI b) { return {_mm512_max_epi32(a.x, b.x)}; }
ZX_HD uint32_t largest_unsigned(VecI a) { return _mm512_reduce_max_epu32(a.x); }
// Of the 16-bit halves of each.
ZX_HD VecI max_halves(VecI a, VecI b) { return {_mm512_max_epu16(a.x, b.x)}; }
ZX_HD bool any_greater(VecI a, uint32_t limit) { return _mm512_cmpgt_epi32_mask(a.x, VecI::splat(limit).x) != 0; }

ZX_HD Mask greater(VecF a, VecF b) { return {_mm512_cmp_ps_mask(a.x, b.x, _CMP_GT_OQ)}; }
ZX_HD Mask greater_signed(VecI a, VecI b) { return {_mm512_cmpgt_epi32_mask(a.x, b.x)}; }
ZX_HD VecF select(Mask m, VecF a, VecF b) { return {_mm512_mask_blend_ps(m.x, b.x, a.x)}; }
ZX_HD VecI keep_if(Mask m, VecI a) { return {_mm512_maskz_mov_epi32(m.x, a.x)}; }
ZX_HD VecI keep_unless(Mask m, VecI a) { return {_mm512_maskz_mov_epi32(static_cast<__mmask16>(~m.x), a.x)}; }
ZX_HD VecI less_one_if(Mask m, VecI a) { return {_mm512_mask_sub_epi32(a.x, m.x, a.x, VecI::splat(1).x)}; }

// table[i % 8], and of bytes table[i % 16], for i below 128.
ZX_HD VecF look_up(const float (&table)[8], VecI i) {
  return {_mm512_permutexvar_ps(i.x, _mm512_broadcast_f32x8(_mm256_loadu_ps(table)))};
}
ZX_HD VecI look_up(const uint8_t (&table)[16], VecI i) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), i.x)};
}

// Bytes of four vectors: of each 128 bits the same four lanes of all four, until they are stored.
struct Bytes {
  static constexpr int kCount = 4 * VecI::kLanes;
  __m512i x;

  static ZX_HD Bytes splat(uint8_t value) { return {_mm512_set1_epi8(static_cast<char>(value))}; }
  // Upper halves & mask, saturated: to 255.
  static ZX_HD Bytes upper_halves(const VecI (&v)[4], int16_t mask) {
    const auto two = [mask](VecI a, VecI b) ZX_LAMBDA {
      return _mm512_and_si512(_mm512_mask_blend_epi16(0xaaaaaaaa, (a >> 16).x, b.x), _mm512_set1_epi16(mask));
    };
    const __m512i order = _mm512_set4_epi32(0x0f0d0b09, 0x0e0c0a08, 0x07050301, 0x06040200);
    return {_mm512_shuffle_epi8(_mm512_packus_epi16(two(v[0], v[1]), two(v[2], v[3])), order)};
  }
  // A number with the sign of each, 0 for 0.
  static ZX_HD Bytes signs(const VecI (&v)[4]) {
    return {_mm512_packs_epi16(_mm512_packs_epi32(v[0].x, v[1].x), _mm512_packs_epi32(v[2].x, v[3].x))};
  }
  ZX_HD void store(uint8_t* p) const {
    const __m512i from = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi32(from, x));
  }
};
ZX_HD Bytes operator+(Bytes a, Bytes b) { return {_mm512_add_epi8(a.x, b.x)}; }
ZX_HD Bytes operator-(Bytes a, Bytes b) { return {_mm512_sub_epi8(a.x, b.x)}; }
ZX_HD Bytes operator^(Bytes a, Bytes b) { return {_mm512_xor_si512(a.x, b.x)}; }
ZX_HD Bytes min(Bytes a, Bytes b) { return {_mm512_min_epu8(a.x, b.x)}; }
// 255 where negative, else 0.
ZX_HD Bytes negative(Bytes a) { return {_mm512_movm_epi8(_mm512_movepi8_mask(a.x))}; }
ZX_HD Bytes negate_where_negative(Bytes a, Bytes signs) {
  return {_mm512_mask_sub_epi8(a.x, _mm512_movepi8_mask(signs.x), _mm512_setzero_si512(), a.x)};
}

#elif defined(ZX_SIMD_AVX2)

struct Mask {
  __m256i x;
};
struct VecI {
  static constexpr int kLanes = VecF::kLanes;
  __m256i x;

  static ZX_HD VecI splat(uint32_t value) { return {_mm256_set1_epi32(static_cast<int32_t>(value))}; }
  static ZX_HD VecI lane_numbers() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)}; }
  static ZX_HD VecI of(VecF a) { return {_mm256_castps_si256(a.x)}; }
  ZX_HD VecF as_float() const { return {_mm256_castsi256_ps(x)}; }
  ZX_HD VecF to_float() const { return {_mm256_cvtepi32_ps(x)}; }
  ZX_HD void store_lower_halves(void* p) const { VecF::put16(p, VecF::narrow16(x)); }
  static ZX_HD VecI load(const uint32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  ZX_HD void store(uint32_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
  static ZX_HD VecI load(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
  }
};
ZX_HD VecI operator+(VecI a, VecI b) { return {_mm256_add_epi32(a.x, b.x)}; }
ZX_HD VecI operator-(VecI a, VecI b) { return {_mm256_sub_epi32(a.x, b.x)}; }
ZX_HD VecI operator*(VecI a, uint32_t b) { return {_mm256_mullo_epi32(a.x, VecI::splat(b).x)}; }
ZX_HD VecI operator&(VecI a, VecI b) { return {_mm256_and_si256(a.x, b.x)}; }
ZX_HD VecI operator|(VecI a, VecI b) { return {_mm256_or_si256(a.x, b.x)}; }
ZX_HD VecI operator^(VecI a, VecI b) { return {_mm256_xor_si256(a.x, b.x)}; }
ZX_HD VecI operator<<(VecI a, VecI b) { return {_mm256_sllv_epi32(a.x, b.x)}; }
ZX_HD VecI operator>>(VecI a, VecI b) { return {_mm256_srlv_epi32(a.x, b.x)}; }
ZX_HD VecI operator<<(VecI a, int bits) { return {_mm256_slli_epi32(a.x, bits)}; }
ZX_HD VecI operator>>(VecI a, int bits) { return {_mm256_srli_epi32(a.x, bits)}; }
ZX_HD VecI min_unsigned(VecI a, VecI b) { return {_mm256_min_epu32(a.x, b.x)}; }
ZX_HD VecI max_unsigned(VecI a, VecI b) { return {_mm256_max_epu32(a.x, b.x)}; }
ZX_HD VecI abs(VecI a) { return {_mm256_abs_epi32(a.x)}; }
ZX_HD VecI min_signed(VecI a, VecI b) { return {_mm256_min_epi32(a.x, b.x)}; }
ZX_HD VecI max_signed(VecI a, VecI b) { return {_mm256_max_epi32(a.x, b.x)}; }
ZX_HD uint32_t largest_unsigned(VecI a) {
  __m128i most = _mm_max_epu32(_mm256_castsi256_si128(a.x), _mm256_extracti128_si256(a.x, 1));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
}
// Of the 16-bit halves of each.
ZX_HD VecI max_halves(VecI a, VecI b) { return {_mm256_max_epu16(a.x, b.x)}; }
ZX_HD bool any_greater(VecI a, uint32_t limit) {
  return _mm256_movemask_epi8(_mm256_cmpgt_epi32(a.x, VecI::splat(limit).x)) != 0;
}

ZX_HD Mask greater(VecF a, VecF b) { return {_mm256_castps_si256(_mm256_cmp_ps(a.x, b.x, _CMP_GT_OQ))}; }
ZX_HD Mask greater_signed(VecI a, VecI b) { return {_mm256_cmpgt_epi32(a.x, b.x)}; }
ZX_HD VecF select(Mask m, VecF a, VecF b) { return {_mm256_blendv_ps(b.x, a.x, _mm256_castsi256_ps(m.x))}; }
ZX_HD VecI keep_if(Mask m, VecI a) { return {_mm256_and_si256(m.x, a.x)}; }
ZX_HD VecI keep_unless(Mask m, VecI a) { return {_mm256_andnot_si256(m.x, a.x)}; }
ZX_HD VecI less_one_if(Mask m, VecI a) { return {_mm256_add_epi32(a.x, m.x)}; }

// table[i % 8], and of bytes table[i % 16], for i below 128.
ZX_HD VecF look_up(const float (&table)[8], VecI i) { return {_mm256_permutevar8x32_ps(_mm256_loadu_ps(table), i.x)}; }
ZX_HD VecI look_up(const uint8_t (&table)[16], VecI i) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), i.x)};
}

// Bytes of four vectors: of each 128 bits the same four lanes of all four, until they are stored.
struct Bytes {
  static constexpr int kCount = 4 * VecI::kLanes;
  __m256i x;

  static ZX_HD Bytes splat(uint8_t value) { return {_mm256_set1_epi8(static_cast<char>(value))}; }
  // Upper halves & mask, saturated: to 255.
  static ZX_HD Bytes upper_halves(const VecI (&v)[4], int16_t mask) {
    const auto two = [mask](VecI a, VecI b) ZX_LAMBDA {
      return _mm256_and_si256(_mm256_blend_epi16((a >> 16).x, b.x, 0xaa), _mm256_set1_epi16(mask));
    };
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi32(0x06040200, 0x07050301, 0x0e0c0a08, 0x0f0d0b09));
    return {_mm256_shuffle_epi8(_mm256_packus_epi16(two(v[0], v[1]), two(v[2], v[3])), order)};
  }
  // A number with the sign of each, 0 for 0.
  static ZX_HD Bytes signs(const VecI (&v)[4]) {
    return {_mm256_packs_epi16(_mm256_packs_epi32(v[0].x, v[1].x), _mm256_packs_epi32(v[2].x, v[3].x))};
  }
  ZX_HD void store(uint8_t* p) const {
    const __m256i from = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(x, from));
  }
};
ZX_HD Bytes operator+(Bytes a, Bytes b) { return {_mm256_add_epi8(a.x, b.x)}; }
ZX_HD Bytes operator-(Bytes a, Bytes b) { return {_mm256_sub_epi8(a.x, b.x)}; }
ZX_HD Bytes operator^(Bytes a, Bytes b) { return {_mm256_xor_si256(a.x, b.x)}; }
ZX_HD Bytes min(Bytes a, Bytes b) { return {_mm256_min_epu8(a.x, b.x)}; }
// 255 where negative, else 0.
ZX_HD Bytes negative(Bytes a) { return {_mm256_cmpgt_epi8(_mm256_setzero_si256(), a.x)}; }
ZX_HD Bytes negate_where_negative(Bytes a, Bytes signs) { return {_mm256_sign_epi8(a.x, signs.x)}; }

#endif
