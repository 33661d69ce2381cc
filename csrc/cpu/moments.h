// How moments are stored: load() gives V::kLanes of each as they are computed with, store() takes them back. Included
// by kernels_<isa>.cpp only.

template <class T>
struct WideMoments {
  T* exp_avg;
  T* exp_avg_sq;
  T* max_exp_avg_sq;

  explicit WideMoments(const AdamSpan& span)
      : exp_avg(static_cast<T*>(span.moments.exp_avg.values)),
        exp_avg_sq(static_cast<T*>(span.moments.exp_avg_sq.values)),
        max_exp_avg_sq(static_cast<T*>(span.moments.max_exp_avg_sq.values)) {}
  template <bool kAmsgrad, class V>
  ZX_HD void load(AdamLanes<V>& at, int64_t i) const {
    at.exp_avg = V::load(exp_avg + i);
    at.exp_avg_sq = V::load(exp_avg_sq + i);
    if constexpr (kAmsgrad) at.max_exp_avg_sq = V::load(max_exp_avg_sq + i);
  }
  template <bool kAmsgrad, class V>
  ZX_HD void store(const AdamLanes<V>& at, int64_t i) const {
    at.exp_avg.store(exp_avg + i);
    at.exp_avg_sq.store(exp_avg_sq + i);
    if constexpr (kAmsgrad) at.max_exp_avg_sq.store(max_exp_avg_sq + i);
  }
};
struct Bf16Moments {
  bf16* exp_avg;
  bf16* exp_avg_sq;
  bf16* max_exp_avg_sq;
  RandomKey key;
  int64_t param_start;

  explicit Bf16Moments(const AdamSpan& span)
      : exp_avg(static_cast<bf16*>(span.moments.exp_avg.values)),
        exp_avg_sq(static_cast<bf16*>(span.moments.exp_avg_sq.values)),
        max_exp_avg_sq(static_cast<bf16*>(span.moments.max_exp_avg_sq.values)),
        key(span.random_key),
        param_start(span.param_start) {}
  template <bool kAmsgrad, class V>
  ZX_HD void load(AdamLanes<V>& at, int64_t i) const {
    at.exp_avg = V::load(exp_avg + i);
    at.exp_avg_sq = V::load(exp_avg_sq + i);
    if constexpr (kAmsgrad) at.max_exp_avg_sq = V::load(max_exp_avg_sq + i);
  }
  template <bool kAmsgrad, class V>
  ZX_HD void store(const AdamLanes<V>& at, int64_t i) const {
    const auto random = LaneBits<V>::random(key, param_start + i);
    store_stochastic(at.exp_avg, random, exp_avg + i);
    store_stochastic(at.exp_avg_sq, random.upper_half(), exp_avg_sq + i);
    if constexpr (kAmsgrad) store_stochastic(at.max_exp_avg_sq, random.upper_half(), max_exp_avg_sq + i);
  }
};

// One block of a moment in 8 bits: its old codes, and its new values until their scale is known.
template <bool kHasNegatives>
struct CodedBlock {
  static constexpr const DynamicMap& kMap = kHasNegatives ? kSignedMap : kUnsignedMap;
  uint8_t* codes;
  float* scale_at;
  float scale;
  alignas(64) float values[kMomentBlock];

  ZX_HD void open(const Moment& moment, int64_t first) {
    codes = static_cast<uint8_t*>(moment.values) + first;
    scale_at = moment.scales + first / kMomentBlock;
    scale = *scale_at;
  }
  template <class V>
  ZX_HD V load(int64_t i) const {
    return decode_lanes(V{}, kMap.values, codes + i) * V::splat(scale);
  }
  // One function for all kinds of parameters and gradients: compiling takes long enough.
  __attribute__((noinline)) void close(int64_t numel) {
    for (int64_t i = numel; i < kMomentBlock; ++i) values[i] = 0.0f;
    *scale_at = scale = scale_of_key<kHasNegatives>(largest_scale_key<kHasNegatives>(values, kMomentBlock));
    const VecF inverse = VecF::splat(1.0f / scale);
    uint8_t coded[kMomentBlock];
    uint8_t* const to = numel == kMomentBlock ? codes : coded;
    for (int64_t i = 0; i < kMomentBlock; i += VecF::kLanes) {
      encode_lanes<kHasNegatives>(kMap.nearest, VecF::load(values + i), inverse, to + i);
    }
    if (to == coded) memcpy(codes, coded, static_cast<size_t>(numel));
  }
};
struct BlockMoments {
  CodedBlock<true> exp_avg;
  CodedBlock<false> exp_avg_sq;
  CodedBlock<false> max_exp_avg_sq;

  template <bool kAmsgrad>
  ZX_HD void open(const Moments& moments, int64_t first) {
    exp_avg.open(moments.exp_avg, first);
    exp_avg_sq.open(moments.exp_avg_sq, first);
    if constexpr (kAmsgrad) max_exp_avg_sq.open(moments.max_exp_avg_sq, first);
  }
  template <bool kAmsgrad, class V>
  ZX_HD void load(AdamLanes<V>& at, int64_t i) const {
    at.exp_avg = exp_avg.load<V>(i);
    at.exp_avg_sq = exp_avg_sq.load<V>(i);
    if constexpr (kAmsgrad) at.max_exp_avg_sq = max_exp_avg_sq.load<V>(i);
  }
  template <bool kAmsgrad, class V>
  ZX_HD void store(const AdamLanes<V>& at, int64_t i) {
    at.exp_avg.store(exp_avg.values + i);
    at.exp_avg_sq.store(exp_avg_sq.values + i);
    if constexpr (kAmsgrad) at.max_exp_avg_sq.store(max_exp_avg_sq.values + i);
  }
  template <bool kAmsgrad>
  ZX_HD void close(int64_t numel) {
    exp_avg.close(numel);
    exp_avg_sq.close(numel);
    if constexpr (kAmsgrad) max_exp_avg_sq.close(numel);
  }
};
