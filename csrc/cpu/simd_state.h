// Vectors of states as they are stored in 16 bits, for one instruction set: what math/random.h and rounding.h do to one
// element, for V::kLanes of them. Included by kernels_<isa>.cpp only.

#if defined(ZX_HAS_VECTORS)
// The four are mixed in step: one word's mixing is a chain in which each operation waits for the one before.
ZX_HD void mix32_of_four(VecI (&x)[4]) {
  for (VecI& each : x) each = (each ^ (each >> 16)) * kMix32First;
  for (VecI& each : x) each = (each ^ (each >> 15)) * kMix32Second;
  for (VecI& each : x) each = each ^ (each >> 15);
}
#endif

// The random_bits() of neighbours. `element`: the lower half of the first one's index, and `second` is the
// second_word() of all of them.
ZX_HD void fill_random(uint32_t first, uint32_t second, uint32_t element, int64_t numel, uint32_t* words) {
  int64_t i = 0;
#if defined(ZX_HAS_VECTORS)
  VecI index = VecI::splat(element) + VecI::lane_numbers();
  for (; i + 4 * VecI::kLanes <= numel; i += 4 * VecI::kLanes) {
    VecI word[4];
    for (int v = 0; v < 4; ++v) {
      word[v] = index ^ VecI::splat(first);
      index = index + VecI::splat(VecI::kLanes);
    }
    mix32_of_four(word);
    for (int v = 0; v < 4; ++v) word[v] = word[v] ^ VecI::splat(second);
    mix32_of_four(word);
    for (int v = 0; v < 4; ++v) word[v].store(words + i + v * VecI::kLanes);
  }
  for (; i + VecI::kLanes <= numel; i += VecI::kLanes) {
    mix32(mix32(index ^ VecI::splat(first)) ^ VecI::splat(second)).store(words + i);
    index = index + VecI::splat(VecI::kLanes);
  }
#endif
  for (; i < numel; ++i) words[i] = mix32(mix32((element + static_cast<uint32_t>(i)) ^ first) ^ second);
}

// Rounds by the upper or the lower half of the random bits.
template <bool kUpper>
ZX_HD void store_stochastic(ScalarLane<float> value, const uint32_t* random, bf16* p) {
  *p = float_to_bf16_stochastic(value.x, kUpper ? *random >> 16 : *random);
}

#if defined(ZX_HAS_VECTORS)

template <bool kUpper>
ZX_HD void store_stochastic(VecF value, const uint32_t* random, bf16* p) {
  const VecI half = kUpper ? VecI::load(random) >> 16 : VecI::load(random) & VecI::splat(0xffff);
  const VecI bits = VecI::of(value);
  const VecI magnitude = bits & VecI::splat(kMagnitudeBits);
  // The upper half of the largest number stays, and so do those of infinity and NaN: nothing is carried into the sign.
  const Mask stays = greater_signed(magnitude, VecI::splat(0x7f7effff));
  const Mask nan = greater_signed(magnitude, VecI::splat(kInfinityBits));
  const VecI rounded = bits + keep_unless(stays, half);
  (rounded | keep_if(nan, VecI::splat(0x400000))).store_upper_halves(p);
}

#endif
