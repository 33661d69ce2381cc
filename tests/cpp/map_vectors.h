// What map_vectors_test.cpp asks of the vectors of one instruction set. Included inside its target pragma and a
// namespace, behind csrc/cpu/simd_map.h.

// How many values of a block with every code differ from those of the table.
template <bool kHasNegatives, auto kDecodeBlock>
int64_t wrong_values(float scale) {
  alignas(64) uint8_t codes[kStateBlock];
  alignas(64) float values[kStateBlock];
  for (int i = 0; i < kStateBlock; ++i) codes[i] = static_cast<uint8_t>(i);
  kDecodeBlock(codes, scale, values);
  int64_t wrong = 0;
  for (int i = 0; i < kStateBlock; ++i) {
    const float expected = decode(Map<kHasNegatives>::tables.values, codes[i], scale);
    wrong += std::bit_cast<uint32_t>(values[i]) != std::bit_cast<uint32_t>(expected);
  }
  return wrong;
}

// Whether the codes of a block of values are these.
template <bool kHasNegatives>
bool has_codes(const float* values, float inverse, const uint8_t* expected) {
  alignas(64) uint8_t codes[kStateBlock];
  encode_block<kHasNegatives>(values, inverse, codes);
  return std::memcmp(codes, expected, kStateBlock) == 0;
}

// How many groups of a block of values are in doubt.
template <bool kHasNegatives>
int64_t groups_in_doubt(const float* values) {
  Measured measured;
  for (int64_t i = 0; i < kStateBlock; i += VecF::kLanes) measure<kHasNegatives>(values, 1.0f, i, measured);
  alignas(64) uint8_t codes[kStateBlock];
  int64_t in_doubt = 0;
  for (int64_t i = 0; i < kStateBlock; i += Bytes::kCount) {
    in_doubt += !encode_group<kHasNegatives>(values, 1.0f, measured, i, codes);
  }
  return in_doubt;
}

template <bool kHasNegatives>
constexpr VectorsOfMap kVectors{wrong_values<kHasNegatives, decode_block<kHasNegatives>>, has_codes<kHasNegatives>,
                                groups_in_doubt<kHasNegatives>, kStateBlock / Bytes::kCount};
