// Random bits without a generator's state: a hash of the step, the parameter and the element. An element gets the same
// bits in the same step whatever its bucket and shard, the world size, the thread or the device.
#pragma once

#include <cstdint>

#include "math/macros.h"

namespace zx {

// Runs with the same gradients give the same results: the seed is a constant, and torch's generators play no part.
constexpr uint64_t kRandomSeed = 0x7a65726f78;  // "zerox"

// The part of the hash that all elements of a parameter share in one step.
struct RandomKey {
  uint32_t first;
  uint32_t second;
};

// The finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
ZX_HD uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// `step`: the parameter's own count, this update included. `param`: its number, see Segment.
ZX_HD RandomKey random_key(int64_t step, int64_t param) {
  const uint64_t key = mix64(mix64(kRandomSeed ^ static_cast<uint64_t>(param)) ^ static_cast<uint64_t>(step));
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

// Wellons' 32-bit mixer, a bijection: the least biased of those that he found by search (hash-prospector).
// Word: uint32_t, or a vector of them.
constexpr uint32_t kMix32First = 0x21f0aaad;
constexpr uint32_t kMix32Second = 0x735a2d97;
template <class Word>
ZX_HD Word mix32(Word x) {
  x = (x ^ (x >> 16)) * kMix32First;
  x = (x ^ (x >> 15)) * kMix32Second;
  return x ^ (x >> 15);
}

// The key's second word with the upper half of the element's index mixed in: parameters may have more than 2^32
// elements.
ZX_HD uint32_t second_word(RandomKey key, int64_t element) {
  return key.second ^ (static_cast<uint32_t>(element >> 32) * 0x9e3779b9u);
}

// 32 bits for one element, counted from the parameter's start. A state is rounded by the lower 16 or the upper 16, as
// its rule says (StateTraits): two states that share a half are rounded alike. All arithmetic is 32-bit, for SIMD.
ZX_HD uint32_t random_bits(RandomKey key, int64_t element) {
  return mix32(mix32(static_cast<uint32_t>(element) ^ key.first) ^ second_word(key, element));
}

}  // namespace zx
