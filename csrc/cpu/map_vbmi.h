// 8-bit codes to values with AVX-512 VBMI, which looks up bytes in tables of 128. Included by kernels_avx512.cpp only,
// under a target pragma of its own: CPUs without VBMI use simd_map.h.
//
// A table of 256 floats is looked up as four tables of bytes, and what is found for 64 codes is woven into 4 vectors of
// floats. So the values are those of the map's table, bit for bit.

// Byte b of the value of a code is of[b][code].
struct BytePlanes {
  alignas(64) uint8_t of[4][256];
};
template <bool kHasNegatives>
consteval BytePlanes make_byte_planes() {
  BytePlanes made{};
  for (uint32_t code = 0; code < 256; ++code) {
    // Magnitudes of the signed map are looked up modulo 128: 1 in the place of 0.
    const uint32_t found_for = kHasNegatives && code == 0 ? kOneSignedCode : code;
    const uint32_t bits = std::bit_cast<uint32_t>(Map<kHasNegatives>::tables.values[found_for]);
    for (int b = 0; b < 4; ++b) made.of[b][code] = static_cast<uint8_t>(bits >> (8 * b));
  }
  return made;
}
template <bool kHasNegatives>
inline constexpr BytePlanes kBytePlanes = make_byte_planes<kHasNegatives>();

// 64 bytes of plane `b`, from code 64 * quarter on.
template <bool kHasNegatives>
ZX_HD __m512i plane_quarter(int b, int quarter) {
  return _mm512_load_si512(kBytePlanes<kHasNegatives>.of[b] + 64 * quarter);
}

// Bytes b of the values of 64 codes are in planes[b].
ZX_HD void look_up_signed(__m512i codes, __m512i (&planes)[4]) {
  const __m512i magnitudes = _mm512_abs_epi8(codes);
  // 0 and 1 share a place. They differ in the upper two bytes alone.
  const __mmask64 not_zero = _mm512_test_epi8_mask(codes, codes);
  for (int b = 0; b < 4; ++b) {
    const __mmask64 kept = b < 2 ? ~__mmask64{0} : not_zero;
    planes[b] = _mm512_maskz_permutex2var_epi8(kept, plane_quarter<true>(b, 0), magnitudes, plane_quarter<true>(b, 1));
  }
  // Negative are the codes from 129 on. Less 1, saturated, these alone have the sign bit.
  const __m512i less_one = _mm512_subs_epu8(codes, _mm512_set1_epi8(1));
  constexpr int kXorAnd = 0x78;  // a ^ (b & c)
  planes[3] = _mm512_ternarylogic_epi32(planes[3], less_one, _mm512_set1_epi8(-128), kXorAnd);
}
ZX_HD void look_up_unsigned(__m512i codes, __m512i (&planes)[4]) {
  const __mmask64 upper = _mm512_movepi8_mask(codes);
  for (int b = 0; b < 4; ++b) {
    const auto half = [&](int h) ZX_LAMBDA {
      return _mm512_permutex2var_epi8(plane_quarter<false>(b, 2 * h), codes, plane_quarter<false>(b, 2 * h + 1));
    };
    planes[b] = _mm512_mask_blend_epi8(upper, half(0), half(1));
  }
}

// decode_block() of simd_map.h.
template <bool kHasNegatives>
ZX_HD void decode_block_vbmi(const uint8_t* codes, float scale, float* values) {
  // Weaving takes four bytes from each 128 bits for each of the four vectors: these bytes have to be a vector's.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t i = 0; i < kStateBlock; i += 64) {
    __m512i planes[4];
    const __m512i ordered = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(codes + i));
    if constexpr (kHasNegatives) {
      look_up_signed(ordered, planes);
    } else {
      look_up_unsigned(ordered, planes);
    }
    const auto put = [&](int v, __m512i bits) ZX_LAMBDA {
      (VecF{_mm512_castsi512_ps(bits)} * VecF::splat(scale)).store(values + i + v * VecF::kLanes);
    };
    const __m512i low_of_low = _mm512_unpacklo_epi8(planes[0], planes[1]);
    const __m512i high_of_low = _mm512_unpacklo_epi8(planes[2], planes[3]);
    put(0, _mm512_unpacklo_epi16(low_of_low, high_of_low));
    put(1, _mm512_unpackhi_epi16(low_of_low, high_of_low));
    const __m512i low_of_high = _mm512_unpackhi_epi8(planes[0], planes[1]);
    const __m512i high_of_high = _mm512_unpackhi_epi8(planes[2], planes[3]);
    put(2, _mm512_unpacklo_epi16(low_of_high, high_of_high));
    put(3, _mm512_unpackhi_epi16(low_of_high, high_of_high));
  }
}
