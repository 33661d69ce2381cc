// Which rank owns which rows of a table, as zerox/memory/row_owners.py deals them: blocks of rows, in any order.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace zx {

constexpr int64_t kBlockRows = 64;

// An owner keeps its rows in ascending order, each at a place of its own.
class RowOwners {
 public:
  // `of_block`: int32, the owner of each block. Throws std::invalid_argument if it does not fit.
  RowOwners(int64_t num_rows, int64_t world, const at::Tensor& of_block);

  int64_t num_rows() const { return num_rows_; }
  int64_t owned_by(int64_t rank) const { return num_owned_[rank]; }
  int32_t owner_of(int64_t row) const { return of_block_[row / kBlockRows]; }
  int64_t place_of(int64_t row) const { return places_[row / kBlockRows] + row % kBlockRows; }
  int64_t row_at(int64_t rank, int64_t place) const {
    return blocks_[rank][place / kBlockRows] * kBlockRows + place % kBlockRows;
  }

 private:
  int64_t num_rows_;
  std::vector<int32_t> of_block_;
  std::vector<int64_t> places_;               // of each block's first row
  std::vector<std::vector<int64_t>> blocks_;  // by owner
  std::vector<int64_t> num_owned_;
};

// Note [How rows are named on the wire]
// A message names rows that one rank owns, in ascending order: by an int32 for each, or by a bit for each row that the
// owner has, whichever takes fewer words. Both sides know how many rows there are, or at most are, and so which it is.
// So no message is longer than the dense rows would be, but for one bit a row.
constexpr int64_t kBitsAWord = 32;
inline int64_t bit_words(int64_t owned) { return (owned + kBitsAWord - 1) / kBitsAWord; }
inline bool named_by_bits(int64_t count, int64_t owned) { return bit_words(owned) < count; }
inline int64_t name_words(int64_t count, int64_t owned) { return std::min(count, bit_words(owned)); }

// Writes names of rows, one after the other.
class NameWriter {
 public:
  NameWriter(int32_t* words, int64_t count, int64_t owned)
      : words_(words), by_bits_(named_by_bits(count, owned)), next_(words) {
    if (by_bits_) std::fill_n(words, bit_words(owned), 0);
  }
  void add(int64_t row, int64_t place) {
    if (by_bits_) {
      auto& word = words_[place / kBitsAWord];
      word = static_cast<int32_t>(static_cast<uint32_t>(word) | uint32_t{1} << (place % kBitsAWord));
    } else {
      *next_++ = static_cast<int32_t>(row);
    }
  }

 private:
  int32_t* words_;
  bool by_bits_;
  int32_t* next_;
};

// The places of the `count` rows that a message names, which `rank` owns. Throws std::runtime_error if it names others:
// what another rank's memory holds may be anything, if that rank has failed.
void read_names(const int32_t* words, int64_t count, int64_t most, int64_t rank, const RowOwners& owners,
                std::vector<int32_t>& places);

}  // namespace zx
