// States as they are stored. Wide ones and those in bf16 are updated where they lie. Those in 8 bits are updated a
// chunk at a time: their new values stay in a buffer until they are encoded, since that needs the scale of a whole
// block. Included by kernels_<isa>.cpp only.

// Elements that are updated together before they are encoded: whole blocks. The fewer they are, the more evenly memory
// is read, and the processor fetches ahead by itself. With one block alone, constants would be loaded too often.
constexpr int64_t kChunk = 2 * kStateBlock;

// Calls body(first, count) for each part of [0, numel) that is `most` elements long, or the rest.
template <class Body>
ZX_HD void for_each_part(int64_t numel, int64_t most, const Body& body) {
  for (int64_t first = 0; first < numel; first += most) body(first, numel - first < most ? numel - first : most);
}

template <class T, int N>
struct WideState {
  static constexpr bool kSharesScale = false;

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

// ---- bf16

// States of elements whose indices have the upper half in common.
template <class Rule, int N>
struct Bf16State {
  bf16* values[N];
  uint32_t first;
  uint32_t second;
  uint32_t element;  // the lower half of element 0's index

  // Of the span's elements from `start` on.
  ZX_HD Bf16State(const UpdateSpan& span, int64_t start)
      : first(span.random.key.first),
        second(second_word(span.random.key, span.random.param_start + start)),
        element(static_cast<uint32_t>(span.random.param_start + start)) {
    for_each_state<N>([&](auto s)
                          ZX_LAMBDA { values[s.value] = static_cast<bf16*>(span.states.at[s.value].values) + start; });
  }
  template <class V>
  ZX_HD void load(Lanes<V, N>& lanes, int64_t i) const {
    for_each_state<N>([&](auto s) ZX_LAMBDA { lanes.state[s.value] = V::load(values[s.value] + i); });
  }
  // `random`: the random_bits() of these lanes. `keep`: KeptBeside16Bits or AllBeside16Bits of these lanes.
  template <class V, class Random, class Keep>
  ZX_HD void store(const Lanes<V, N>& lanes, Random random, int64_t i, const Keep& keep) const {
    for_each_state<N>([&](auto s) ZX_LAMBDA {
      constexpr bool kUpper = Rule::kStates[decltype(s)::value].takes_upper_bits;
      store_stochastic<kUpper>(lanes.state[s.value], random, keep, values[s.value] + i);
    });
  }
};

// ---- 8 bits

// Decodes whole blocks: `numel` codes that begin with a block.
using DecodeBlocks = void (*)(const uint8_t* codes, const float* scales, int64_t numel, float* values);

// Not inlined, nor is CodedChunk::encode(): all kinds of parameters and gradients share them, since compiling takes
// long enough.
template <bool kHasNegatives>
__attribute__((noinline)) void decode_blocks(const uint8_t* codes, const float* scales, int64_t numel, float* values) {
  for (int64_t i = 0; i < numel; i += kStateBlock) {
    decode_block<kHasNegatives>(codes + i, scales[i / kStateBlock], values + i);
  }
}

// For the map without negatives, and for the one with them. An instruction set may have better ones.
struct Decoders {
  DecodeBlocks of[2];
};
constexpr Decoders kDecoders{{decode_blocks<false>, decode_blocks<true>}};

// One state's part of a chunk. `values` are the old ones, and the new ones after the update.
struct CodedChunk {
  uint8_t* codes;
  float* scales;
  uint32_t keys[kChunk / kStateBlock];  // of the new scales
  alignas(64) float values[kChunk];

  void decode(DecodeBlocks decode_blocks, const StoredState& state, int64_t first, int64_t numel) {
    codes = static_cast<uint8_t*>(state.values) + first;
    scales = state.scales + first / kStateBlock;
    const int64_t whole = numel / kStateBlock * kStateBlock;
    if (whole > 0) decode_blocks(codes, scales, whole, values);
    if (whole < numel) {
      uint8_t last[kStateBlock] = {};
      memcpy(last, codes + whole, static_cast<size_t>(numel - whole));
      decode_blocks(last, scales + whole / kStateBlock, kStateBlock, values + whole);
    }
  }

  template <bool kHasNegatives>
  __attribute__((noinline)) void encode(int64_t numel) {
    for_each_part(numel, kStateBlock, [&](int64_t i, int64_t count) ZX_LAMBDA {
      const int64_t block = i / kStateBlock;
      scales[block] = scale_of_key<kHasNegatives>(keys[block]);
      const float inverse = 1.0f / scales[block];
      if (!kHasNegatives && keys[block] >> 31 != 0) {  // negative after all: somebody has written a negative scale
        return encode_by_table<kHasNegatives>(values + i, inverse, static_cast<int>(count), codes + i);
      }
      uint8_t* to = codes + i;
      uint8_t last[kStateBlock];
      if (count < kStateBlock) {
        memset(values + i + count, 0, static_cast<size_t>(kStateBlock - count) * sizeof(float));
        to = last;
      }
      encode_block<kHasNegatives>(values + i, inverse, to);
      if (to == last) memcpy(codes + i, last, static_cast<size_t>(count));
    });
  }
};

template <class Rule, int N>
struct CodedChunks {
  template <int kState>
  static constexpr bool kHasNegatives = Rule::kStates[kState].has_negatives;

  CodedChunk of[N];

  ZX_HD CodedChunks(const UpdateSpan& span, const Decoders& decoders, int64_t first, int64_t numel) {
    for_each_state<N>([&](auto s) ZX_LAMBDA {
      constexpr int kState = decltype(s)::value;
      of[kState].decode(decoders.of[kHasNegatives<kState>], span.states.at[kState], first, numel);
    });
  }
  ZX_HD void encode(int64_t numel) {
    for_each_state<N>([&](auto s) ZX_LAMBDA {
      constexpr int kState = decltype(s)::value;
      of[kState].template encode<kHasNegatives<kState>>(numel);
    });
  }
};

// One block of a chunk while it is updated: what it finds out of its values stays in registers.
template <class Rule, int N>
struct CodedBlock {
  static constexpr bool kSharesScale = true;
  template <int kState>
  static constexpr bool kHasNegatives = Rule::kStates[kState].has_negatives;

  float* values[N];
  LargestKey keys[N];

  ZX_HD CodedBlock(CodedChunks<Rule, N>& chunks, int64_t first) {
    for_each_state<N>([&](auto s) ZX_LAMBDA {
      values[s.value] = chunks.of[s.value].values + first;
      keys[s.value] = LargestKey::of_none();
    });
  }
  template <class V>
  ZX_HD void load(Lanes<V, N>& lanes, int64_t i) const {
    for_each_state<N>([&](auto s) ZX_LAMBDA { lanes.state[s.value] = V::load(values[s.value] + i); });
  }
  template <class V>
  ZX_HD void store(const Lanes<V, N>& lanes, int64_t i) {
    for_each_state<N>([&](auto s) ZX_LAMBDA {
      constexpr int kState = decltype(s)::value;
      lanes.state[kState].store(values[kState] + i);
      keys[kState].template add<kHasNegatives<kState>>(lanes.state[kState]);
    });
  }
  ZX_HD void put_keys(CodedChunks<Rule, N>& chunks, int64_t block) const {
    for_each_state<N>([&](auto s) ZX_LAMBDA {
      constexpr int kState = decltype(s)::value;
      chunks.of[kState].keys[block] = keys[kState].template get<kHasNegatives<kState>>();
    });
  }
};
