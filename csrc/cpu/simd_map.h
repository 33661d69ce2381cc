// States in 8 bits, for one instruction set: see Note [8-bit states] and Note [The map without tables] in
// math/dynamic_map.h. Included by kernels_<isa>.cpp only.

template <bool kHasNegatives>
struct Map {
  static constexpr const DynamicMap& tables = kHasNegatives ? kSignedMap : kUnsignedMap;
  static constexpr const MapArithmetic& arithmetic = kHasNegatives ? kSignedArithmetic : kUnsignedArithmetic;
};

template <bool kHasNegatives>
__attribute__((noinline)) void encode_by_table(const float* values, float inverse, int numel, uint8_t* codes) {
  for (int i = 0; i < numel; ++i) {
    codes[i] = encode<kHasNegatives>(Map<kHasNegatives>::tables.nearest, values[i], inverse);
  }
}

#if defined(ZX_HAS_VECTORS)

constexpr uint32_t kSignBit = 0x80000000;

// Four vectors are handled together, each step for all four of them: while one waits for a step's result, the others
// are worked on, and their codes fill a vector.
template <class Body>
ZX_HD void for_each_of_group(const Body& body) {
  body(0);
  body(1);
  body(2);
  body(3);
}

template <bool kHasNegatives>
ZX_HD void decode_group(const uint8_t* codes, float scale, float* values) {
  constexpr const MapArithmetic& map = Map<kHasNegatives>::arithmetic;
  constexpr uint32_t kExponentBits = kInfinityBits;
  VecI sign[4];
  VecI number[4];
  VecF value[4];
  for_each_of_group([&](int v) ZX_LAMBDA {
    const VecI code = VecI::load(codes + v * VecI::kLanes);
    if constexpr (kHasNegatives) {
      const VecI below_one = VecI::splat(kOneSignedCode) - code;  // negative for a negative value
      sign[v] = below_one & VecI::splat(kSignBit);
      number[v] = VecI::splat(kOneSignedCode) - abs(below_one);
    } else {
      number[v] = code + VecI::splat(1);
    }
  });
  for_each_of_group([&](int v) ZX_LAMBDA {
    number[v] = VecI::of(number[v].to_float());
    if constexpr (kHasNegatives) {  // so that 0 has an exponent of its own
      number[v] = max_signed(number[v], VecI::of(VecF::splat(0.5f)));
    }
    number[v] = min_signed(number[v], VecI::of(VecF::splat(map.number_of_one)));
  });
  for_each_of_group([&](int v) ZX_LAMBDA {
    const VecF n = (number[v] & VecI::splat(kExponentBits)).as_float();
    const VecF numerator = fma(VecF::splat(18), number[v].as_float(), fma(VecF::splat(-16), n, VecF::splat(9)));
    value[v] = numerator / look_up(map.denominator, number[v] >> kMantissaBits);
  });
  for_each_of_group([&](int v) ZX_LAMBDA {
    if constexpr (kHasNegatives) value[v] = (VecI::of(value[v]) ^ sign[v]).as_float();
    (value[v] * VecF::splat(scale)).store(values + v * VecF::kLanes);
  });
}

// Magnitudes of a block in units of its scale, and the shifts of their positions.
struct Measured {
  alignas(64) float magnitudes[kStateBlock];
  alignas(64) uint32_t shifts[kStateBlock];
};

// A vector, from element i of a block on. `inverse`: 1 / the scale, so that no magnitude exceeds 1 by more than
// 2^-21, unless it is infinite. NaN becomes the least magnitude, as does what counts as 0.
template <bool kHasNegatives>
ZX_HD void measure(const float* values, float inverse, int64_t i, Measured& to) {
  constexpr const MapArithmetic& map = Map<kHasNegatives>::arithmetic;
  const VecF relative = VecF::load(values + i) * VecF::splat(inverse);
  const VecF least = VecF::splat(kLeastMagnitude);
  VecF magnitude;
  if constexpr (kHasNegatives) {
    magnitude = max((VecI::of(relative) & VecI::splat(kMagnitudeBits)).as_float(), least);
  } else {
    magnitude = select(greater(relative, VecF::splat(map.zero_border)), relative, least);
  }
  magnitude.store(to.magnitudes + i);
  const VecI shift = look_up(map.shifts, VecI::of(magnitude) >> 24);
  less_one_if(greater(magnitude, look_up(map.border, shift)), shift).store(to.shifts + i);
}

// Four vectors, from element `first` of a block on. Returns false where there is doubt.
template <bool kHasNegatives>
ZX_HD bool encode_group(const float* values, float inverse, const Measured& measured, int64_t first, uint8_t* codes) {
  constexpr const MapArithmetic& map = Map<kHasNegatives>::arithmetic;
  VecI position[4];
  for_each_of_group([&](int v) ZX_LAMBDA {
    const int64_t i = first + v * VecF::kLanes;
    const VecI shift = VecI::load(measured.shifts + i);
    const VecF magnitude = VecF::load(measured.magnitudes + i);
    const VecF exact = fma(look_up(map.slope, shift), magnitude, VecF::splat(kPositionOfZero));
    position[v] = VecI::of(min(exact, VecF::splat(kMostPosition))) >> shift;
  });
  const VecI rest = max_halves(max_halves(position[0], position[1]), max_halves(position[2], position[3]));
  if constexpr (kHasNegatives) {
    // Only the largest 128n is kept, that of 1: it becomes 255, and then 128, the code of 1. Where the value is
    // negative it becomes 127, since the map has no -1.
    VecI value[4];
    for_each_of_group([&](int v) ZX_LAMBDA { value[v] = VecI::of(VecF::load(values + first + v * VecF::kLanes)); });
    const Bytes sign = Bytes::signs(value) ^ Bytes::splat(inverse < 0.0f ? 0xff : 0);
    const Bytes number = min(Bytes::upper_halves(position, 0x407f), Bytes::splat(kOneSignedCode) + negative(sign));
    negate_where_negative(number, sign).store(codes + first);
  } else {
    (Bytes::upper_halves(position, 0xff) - Bytes::splat(1)).store(codes + first);
  }
  return !any_greater(rest & VecI::splat(0xffff), map.most_rest);
}

#endif

template <bool kHasNegatives>
ZX_HD void decode_block(const uint8_t* codes, float scale, float* values) {
#if defined(ZX_HAS_VECTORS)
  for (int64_t i = 0; i < kStateBlock; i += Bytes::kCount) decode_group<kHasNegatives>(codes + i, scale, values + i);
#else
  for (int64_t i = 0; i < kStateBlock; ++i) values[i] = decode(Map<kHasNegatives>::tables.values, codes[i], scale);
#endif
}

// `inverse`: 1 / the scale.
template <bool kHasNegatives>
ZX_HD void encode_block(const float* values, float inverse, uint8_t* codes) {
#if defined(ZX_HAS_VECTORS)
  Measured measured;
  for (int64_t i = 0; i < kStateBlock; i += VecF::kLanes) measure<kHasNegatives>(values, inverse, i, measured);
  uint32_t in_doubt = 0;  // a bit for each group
  for (int64_t i = 0; i < kStateBlock; i += Bytes::kCount) {
    const bool certain = encode_group<kHasNegatives>(values, inverse, measured, i, codes);
    in_doubt |= static_cast<uint32_t>(!certain) << (i / Bytes::kCount);
  }
  for (; in_doubt != 0; in_doubt &= in_doubt - 1) {
    const int64_t i = std::countr_zero(in_doubt) * Bytes::kCount;
    encode_by_table<kHasNegatives>(values + i, inverse, Bytes::kCount, codes + i);
  }
#else
  encode_by_table<kHasNegatives>(values, inverse, kStateBlock, codes);
#endif
}

// The largest scale_key() of a block's values, which it is given a vector or a lane at a time.
struct LargestKey {
  uint32_t of_lanes;

  template <bool kHasNegatives>
  ZX_HD void add(ScalarLane<float> value) {
    const uint32_t key = scale_key<kHasNegatives>(value.x);
    of_lanes = key > of_lanes ? key : of_lanes;
  }

#if defined(ZX_HAS_VECTORS)
  // Among negative values the one with the largest magnitude has the largest bits; among others it has the largest bits
  // as a signed number.
  VecI most_unsigned;
  VecI most_signed;

  static ZX_HD LargestKey of_none() { return {0, VecI::splat(0), VecI::splat(0)}; }
  template <bool kHasNegatives>
  ZX_HD void add(VecF value) {
    most_unsigned = max_unsigned(most_unsigned, VecI::of(value));
    if constexpr (kHasNegatives) most_signed = max_signed(most_signed, VecI::of(value));
  }
  template <bool kHasNegatives>
  ZX_HD uint32_t get() const {
    const auto keys_of = [](VecI bits) ZX_LAMBDA { return ((bits << 1) | (bits >> 31)) ^ VecI::splat(1); };
    const VecI keys = kHasNegatives ? max_unsigned(keys_of(most_unsigned), keys_of(most_signed)) : most_unsigned;
    const uint32_t of_vectors = largest_unsigned(keys);
    return of_vectors > of_lanes ? of_vectors : of_lanes;
  }
#else
  static ZX_HD LargestKey of_none() { return {0}; }
  template <bool kHasNegatives>
  ZX_HD uint32_t get() const {
    return of_lanes;
  }
#endif
};
