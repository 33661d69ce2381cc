// Vectors of states that are stored in 16 and 8 bits, for one instruction set. They do for V::kLanes elements what
// math/random.h, rounding.h and dynamic_map.h do for one. Included by kernels_<isa>.cpp only.

// Random bits for V::kLanes neighbouring elements.
template <class V>
struct LaneBits;

template <>
struct LaneBits<ScalarLane<float>> {
  uint32_t x;
  static ZX_HD LaneBits random(RandomKey key, int64_t element) { return {random_bits(key, element)}; }
  ZX_HD LaneBits upper_half() const { return {x >> 16}; }
};
ZX_HD void store_stochastic(ScalarLane<float> value, LaneBits<ScalarLane<float>> bits, bf16* p) {
  *p = float_to_bf16_stochastic(value.x, bits.x);
}

#if defined(ZX_SIMD_AVX512)

template <>
struct LaneBits<VecF> {
  __m512i x;

  static ZX_HD LaneBits random(RandomKey key, int64_t element) {
    const __m512i first = _mm512_set1_epi32(static_cast<int32_t>(element));
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i lower = _mm512_add_epi32(first, lane);
    const __mmask16 carried = _mm512_cmplt_epu32_mask(lower, first);
    const auto second = static_cast<int32_t>(second_word(key, element));
    const auto after_carry = static_cast<int32_t>(second_word(key, element + (int64_t{1} << 32)));
    const __m512i mixed = mix(_mm512_xor_si512(lower, _mm512_set1_epi32(static_cast<int32_t>(key.first))));
    return {mix(_mm512_xor_si512(
        mixed, _mm512_mask_blend_epi32(carried, _mm512_set1_epi32(second), _mm512_set1_epi32(after_carry))))};
  }
  ZX_HD LaneBits upper_half() const { return {_mm512_srli_epi32(x, 16)}; }

  static ZX_HD __m512i mix(__m512i x) {
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int32_t>(kMix32First)));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int32_t>(kMix32Second)));
    return _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
  }
};

ZX_HD void store_stochastic(VecF value, LaneBits<VecF> random, bf16* p) {
  const __m512i bits = _mm512_castps_si512(value.x);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __m512i added = _mm512_add_epi32(magnitude, _mm512_and_si512(random.x, _mm512_set1_epi32(0xffff)));
  const __m512i finite = _mm512_min_epu32(added, _mm512_set1_epi32(0x7f7fffff));
  const __m512i infinity = _mm512_set1_epi32(0x7f800000);
  const __mmask16 nan = _mm512_cmpgt_epu32_mask(magnitude, infinity);
  const __m512i other = _mm512_mask_or_epi32(magnitude, nan, magnitude, _mm512_set1_epi32(0x400000));
  const __m512i rounded = _mm512_mask_blend_epi32(_mm512_cmpge_epu32_mask(magnitude, infinity), finite, other);
  const __m512i sign = _mm512_andnot_si512(_mm512_set1_epi32(0x7fffffff), bits);
  VecF::put16(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_or_si512(sign, rounded), 16)));
}

ZX_HD VecF decode_lanes(VecF /*kind*/, const float* values, const uint8_t* codes) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  return {_mm512_i32gather_ps(wide, values, 4)};
}
template <bool kHasNegatives>
ZX_HD void encode_lanes(const uint32_t* nearest, VecF value, VecF inverse, uint8_t* codes) {
  const __m512 relative = (value * inverse).x;
  const __m512i least = _mm512_set1_epi32(static_cast<int32_t>(kLeastBits));
  // max returns its second operand if the first is NaN.
  const __m512 magnitude = _mm512_max_ps(_mm512_abs_ps(relative), _mm512_castsi512_ps(least));
  const __m512i bits = _mm512_castps_si512(_mm512_min_ps(magnitude, _mm512_set1_ps(1.0f)));
  const __m512i entry = _mm512_i32gather_epi32(_mm512_srli_epi32(_mm512_sub_epi32(bits, least), 16), nearest, 4);
  const __m512i low = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff));
  __m512i code = _mm512_srli_epi32(_mm512_add_epi32(entry, low), 16);
  if constexpr (kHasNegatives) {
    const __m512i most = _mm512_set1_epi32(static_cast<int32_t>(kOneSignedCode) - 1);
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(relative));
    code = _mm512_mask_sub_epi32(code, negative, _mm512_setzero_si512(), _mm512_min_epu32(code, most));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(code));
}
// The largest scale_key() of `count` values; `count` is a multiple of the lanes.
template <bool kHasNegatives>
ZX_HD uint32_t largest_scale_key(const float* values, int64_t count) {
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += VecF::kLanes) {
    __m512i key = _mm512_castps_si512(_mm512_loadu_ps(values + i));
    if constexpr (kHasNegatives) key = _mm512_xor_si512(_mm512_rol_epi32(key, 1), _mm512_set1_epi32(1));
    most = _mm512_max_epu32(most, key);
  }
  alignas(64) uint32_t lanes[VecF::kLanes];
  _mm512_store_si512(lanes, most);
  uint32_t largest = 0;
  for (const uint32_t key : lanes) largest = key > largest ? key : largest;
  return largest;
}

#elif defined(ZX_SIMD_AVX2)

template <>
struct LaneBits<VecF> {
  __m256i x;

  static ZX_HD LaneBits random(RandomKey key, int64_t element) {
    const __m256i first = _mm256_set1_epi32(static_cast<int32_t>(element));
    const __m256i lower = _mm256_add_epi32(first, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i no_carry = _mm256_cmpeq_epi32(_mm256_max_epu32(lower, first), lower);
    const auto second = static_cast<int32_t>(second_word(key, element));
    const auto after_carry = static_cast<int32_t>(second_word(key, element + (int64_t{1} << 32)));
    const __m256i mixed = mix(_mm256_xor_si256(lower, _mm256_set1_epi32(static_cast<int32_t>(key.first))));
    return {mix(_mm256_xor_si256(
        mixed, _mm256_blendv_epi8(_mm256_set1_epi32(after_carry), _mm256_set1_epi32(second), no_carry)))};
  }
  ZX_HD LaneBits upper_half() const { return {_mm256_srli_epi32(x, 16)}; }

  static ZX_HD __m256i mix(__m256i x) {
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int32_t>(kMix32First)));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int32_t>(kMix32Second)));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
  }
};

ZX_HD void store_stochastic(VecF value, LaneBits<VecF> random, bf16* p) {
  const __m256i bits = _mm256_castps_si256(value.x);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i added = _mm256_add_epi32(magnitude, _mm256_and_si256(random.x, _mm256_set1_epi32(0xffff)));
  const __m256i largest = _mm256_set1_epi32(0x7f7fffff);
  const __m256i finite = _mm256_min_epu32(added, largest);
  const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));  // both are positive
  const __m256i other = _mm256_or_si256(magnitude, _mm256_and_si256(nan, _mm256_set1_epi32(0x400000)));
  const __m256i rounded = _mm256_blendv_epi8(finite, other, _mm256_cmpgt_epi32(magnitude, largest));
  const __m256i sign = _mm256_andnot_si256(_mm256_set1_epi32(0x7fffffff), bits);
  VecF::put16(p, VecF::narrow16(_mm256_srli_epi32(_mm256_or_si256(sign, rounded), 16)));
}

ZX_HD VecF decode_lanes(VecF /*kind*/, const float* values, const uint8_t* codes) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  return {_mm256_i32gather_ps(values, wide, 4)};
}
template <bool kHasNegatives>
ZX_HD void encode_lanes(const uint32_t* nearest, VecF value, VecF inverse, uint8_t* codes) {
  const __m256 relative = (value * inverse).x;
  const __m256i least = _mm256_set1_epi32(static_cast<int32_t>(kLeastBits));
  const __m256 absolute = _mm256_and_ps(relative, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
  // max returns its second operand if the first is NaN.
  const __m256 magnitude = _mm256_max_ps(absolute, _mm256_castsi256_ps(least));
  const __m256i bits = _mm256_castps_si256(_mm256_min_ps(magnitude, _mm256_set1_ps(1.0f)));
  const __m256i index = _mm256_srli_epi32(_mm256_sub_epi32(bits, least), 16);
  const __m256i entry = _mm256_i32gather_epi32(reinterpret_cast<const int32_t*>(nearest), index, 4);
  const __m256i low = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff));
  __m256i code = _mm256_srli_epi32(_mm256_add_epi32(entry, low), 16);
  if constexpr (kHasNegatives) {
    const __m256i most = _mm256_set1_epi32(static_cast<int32_t>(kOneSignedCode) - 1);
    const __m256i sign = _mm256_srai_epi32(_mm256_castps_si256(relative), 31);
    code = _mm256_blendv_epi8(code, _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_min_epu32(code, most)), sign);
    code = _mm256_and_si256(code, _mm256_set1_epi32(0xff));
  }
  const __m128i words = VecF::narrow16(code);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), _mm_packus_epi16(words, words));
}
// The largest scale_key() of `count` values; `count` is a multiple of the lanes.
template <bool kHasNegatives>
ZX_HD uint32_t largest_scale_key(const float* values, int64_t count) {
  __m256i most = _mm256_setzero_si256();
  for (int64_t i = 0; i < count; i += VecF::kLanes) {
    __m256i key = _mm256_castps_si256(_mm256_loadu_ps(values + i));
    if constexpr (kHasNegatives) {
      const __m256i rotated = _mm256_or_si256(_mm256_slli_epi32(key, 1), _mm256_srli_epi32(key, 31));
      key = _mm256_xor_si256(rotated, _mm256_set1_epi32(1));
    }
    most = _mm256_max_epu32(most, key);
  }
  alignas(32) uint32_t lanes[VecF::kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), most);
  uint32_t largest = 0;
  for (const uint32_t key : lanes) largest = key > largest ? key : largest;
  return largest;
}

#else

template <bool kHasNegatives>
ZX_HD uint32_t largest_scale_key(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t key = scale_key<kHasNegatives>(values[i]);
    largest = key > largest ? key : largest;
  }
  return largest;
}

#endif

ZX_HD ScalarLane<float> decode_lanes(ScalarLane<float> /*kind*/, const float* values, const uint8_t* codes) {
  return {values[*codes]};
}
template <bool kHasNegatives>
ZX_HD void encode_lanes(const uint32_t* nearest, ScalarLane<float> value, ScalarLane<float> inverse, uint8_t* codes) {
  *codes = encode<kHasNegatives>(nearest, value.x, inverse.x);
}
