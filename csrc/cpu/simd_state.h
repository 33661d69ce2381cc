// Vectors of states as they are stored in 16 bits, for one instruction set: what math/random.h and rounding.h do to one
// element, for V::kLanes of them. Included by kernels_<isa>.cpp only.

#if defined(ZX_HAS_VECTORS)

// One word's mixing is a chain in which each operation waits for the one before, so all are mixed in step.
template <int kCount>
ZX_HD void mix32_of_each(VecI (&x)[kCount]) {
  for (VecI& each : x) each = (each ^ (each >> 16)) * kMix32First;
  for (VecI& each : x) each = (each ^ (each >> 15)) * kMix32Second;
  for (VecI& each : x) each = each ^ (each >> 15);
}

// The random_bits() of neighbours. `element`: the lower half of the first one's index, and `second` is the
// second_word() of all of them.
template <int kCount>
ZX_HD void fill_random(uint32_t first, uint32_t second, uint32_t element, VecI (&words)[kCount]) {
  const VecI index = VecI::splat(element) + VecI::lane_numbers();
  for (int v = 0; v < kCount; ++v) words[v] = (index + VecI::splat(v * VecI::kLanes)) ^ VecI::splat(first);
  mix32_of_each(words);
  for (VecI& each : words) each = each ^ VecI::splat(second);
  mix32_of_each(words);
}

#endif

// Rounds by the upper or the lower half of the random bits, and stores what `keep` lets through.
template <bool kUpper, class Keep>
ZX_HD void store_stochastic(ScalarLane<float> value, uint32_t random, const Keep& keep, bf16* p) {
  *p = float_to_bf16_stochastic(keep(value).x, kUpper ? random >> 16 : random);
}

#if defined(ZX_HAS_VECTORS)

// `value` is what arithmetic gave: a NaN is quiet already, and so the upper half of one is a NaN too.
template <bool kUpper, class Keep>
ZX_HD void store_stochastic(VecF value, VecI random, const Keep& keep, bf16* p) {
  const VecI half = kUpper ? random >> 16 : random & VecI::splat(0xffff);
  const VecI bits = VecI::of(value);
  // The upper half of the largest number stays, and so do those of infinity and NaN: nothing is carried into the sign.
  const Mask stays = greater_signed(bits & VecI::splat(kMagnitudeBits), VecI::splat(0x7f7effff));
  keep.upper_halves(bits + keep_unless(stays, half)).store_lower_halves(p);
}

#endif
