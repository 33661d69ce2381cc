// States as they are stored: load() converts V::kLanes of each to the type of the arithmetic, and store() converts them
// back. Included by kernels_<isa>.cpp only.

template <class T, int N>
struct WideState {
  T* values[kRoomFor<N>];

  explicit WideState(const UpdateSpan& span) {
    for_each_state<N>([&](auto s) ZX_LAMBDA { values[s.value] = static_cast<T*>(span.states.at[s.value].values); });
  }
  template <class V>
  ZX_HD void load(Lanes<V, N>& lanes, int64_t i) const {
    for_each_state<N>([&](auto s) ZX_LAMBDA { lanes.state[s.value] = V::load(values[s.value] + i); });
  }
  template <class V>
  ZX_HD void store(const Lanes<V, N>& lanes, int64_t i) const {
    for_each_state<N>([&](auto s) ZX_LAMBDA { lanes.state[s.value].store(values[s.value] + i); });
  }
};

template <class Rule, int N>
struct Bf16State {
  WideState<bf16, N> stored;
  RandomKey key;
  int64_t param_start;

  explicit Bf16State(const UpdateSpan& span) : stored(span), key(span.random_key), param_start(span.param_start) {}
  template <class V>
  ZX_HD void load(Lanes<V, N>& lanes, int64_t i) const {
    stored.load(lanes, i);
  }
  template <class V>
  ZX_HD void store(const Lanes<V, N>& lanes, int64_t i) const {
    const auto random = LaneBits<V>::random(key, param_start + i);
    for_each_state<N>([&](auto s) ZX_LAMBDA {
      constexpr int kState = decltype(s)::value;
      if constexpr (Rule::kStates[kState].takes_upper_bits) {
        store_stochastic(lanes.state[kState], random.upper_half(), stored.values[kState] + i);
      } else {
        store_stochastic(lanes.state[kState], random, stored.values[kState] + i);
      }
    });
  }
};

// One block of a state in 8 bits: its old codes, and its new values until their scale is known.
struct CodedBlock {
  uint8_t* codes;
  float* scale_at;
  float scale;
  alignas(64) float values[kStateBlock];

  ZX_HD void open(const StoredState& state, int64_t first) {
    codes = static_cast<uint8_t*>(state.values) + first;
    scale_at = state.scales + first / kStateBlock;
    scale = *scale_at;
  }
  template <bool kHasNegatives, class V>
  ZX_HD V load(int64_t i) const {
    return decode_lanes(V{}, map_of<kHasNegatives>().values, codes + i) * V::splat(scale);
  }
  // This is one function for all kinds of parameters and gradients: compiling takes long enough.
  template <bool kHasNegatives>
  __attribute__((noinline)) void close(int64_t numel) {
    for (int64_t i = numel; i < kStateBlock; ++i) values[i] = 0.0f;
    *scale_at = scale = scale_of_key<kHasNegatives>(largest_scale_key<kHasNegatives>(values, kStateBlock));
    const VecF inverse = VecF::splat(1.0f / scale);
    uint8_t coded[kStateBlock];
    uint8_t* const to = numel == kStateBlock ? codes : coded;
    for (int64_t i = 0; i < kStateBlock; i += VecF::kLanes) {
      encode_lanes<kHasNegatives>(map_of<kHasNegatives>().nearest, VecF::load(values + i), inverse, to + i);
    }
    if (to == coded) memcpy(codes, coded, static_cast<size_t>(numel));
  }

  template <bool kHasNegatives>
  static ZX_HD const DynamicMap& map_of() {
    return kHasNegatives ? kSignedMap : kUnsignedMap;
  }
};
template <class Rule, int N>
struct BlockState {
  CodedBlock blocks[kRoomFor<N>];

  ZX_HD void open(const StoredStates& states, int64_t first) {
    for_each_state<N>([&](auto s) ZX_LAMBDA { blocks[s.value].open(states.at[s.value], first); });
  }
  template <class V>
  ZX_HD void load(Lanes<V, N>& lanes, int64_t i) const {
    for_each_state<N>([&](auto s) ZX_LAMBDA {
      constexpr int kState = decltype(s)::value;
      lanes.state[kState] = blocks[kState].template load<Rule::kStates[kState].has_negatives, V>(i);
    });
  }
  template <class V>
  ZX_HD void store(const Lanes<V, N>& lanes, int64_t i) {
    for_each_state<N>([&](auto s) ZX_LAMBDA { lanes.state[s.value].store(blocks[s.value].values + i); });
  }
  ZX_HD void close(int64_t numel) {
    for_each_state<N>([&](auto s) ZX_LAMBDA {
      constexpr int kState = decltype(s)::value;
      blocks[kState].template close<Rule::kStates[kState].has_negatives>(numel);
    });
  }
};
