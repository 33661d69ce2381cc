// Which elements of a shard a mask keeps, one bit each.
//
// Note [Masks]
// An update clears what its mask does not keep: the parameter, its master and its states become +0, after the rule has
// had its way with them. So no rule has to know of masks, whatever it makes of zeros (0 / 0, where eps is 0), and what
// a caller has written into a masked element is gone after the next step. States that share a scale are cleared before
// their block's scale is found: what is cleared has no part in it. Norms are those of the kept elements. The gradient
// itself stays as it was reduced, since a mask that changes asks where it is large.
#pragma once

#include <cstdint>
#include <cstring>

#include "math/macros.h"

namespace zx {

// Element i is kept if bit `first + i` is set. Bit b is bit b % 8 of byte b / 8. Without `bits` all are kept. Behind
// the last bit there are kMaskPadding bytes more, so that a vector's bits can be read at once.
constexpr int64_t kMaskPadding = 4;
struct KeptBits {
  const uint8_t* bits = nullptr;
  int64_t first = 0;

  ZX_HD bool has_all() const { return bits == nullptr; }
  ZX_HD KeptBits from(int64_t element) const { return {bits, first + element}; }
  // Those of up to 25 elements from i on: the lowest bits.
  ZX_HD uint32_t word(int64_t i) const {
    const KeptBits there = from(i);
    return there.bytes_of(0) >> there.shift();
  }
  // The same for an i that is a multiple of 8, but from bit shift() on, which a loop over i needs to know only once.
  ZX_HD uint32_t bytes_of(int64_t i) const {
    uint32_t bytes = 0;
    memcpy(&bytes, bits + static_cast<uint64_t>(first) / 8 + static_cast<uint64_t>(i) / 8, sizeof(bytes));
    return bytes;
  }
  ZX_HD unsigned shift() const { return static_cast<unsigned>(first) % 8; }
  // Of N neighbours from element i on, whose bits lie in one byte: the lowest N bits.
  ZX_HD unsigned neighbours(int64_t i) const {
    const int64_t bit = first + i;
    return static_cast<unsigned>(bits[bit / 8]) >> (bit % 8);
  }
  ZX_HD bool at(int64_t i) const { return (neighbours(i) & 1u) != 0; }
};

}  // namespace zx
