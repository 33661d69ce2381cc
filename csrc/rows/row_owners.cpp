#include "rows/row_owners.h"

#include <bit>
#include <stdexcept>
#include <string>

namespace zx {

RowOwners::RowOwners(int64_t num_rows, int64_t world, const at::Tensor& of_block)
    : num_rows_(num_rows), blocks_(world), num_owned_(world) {
  const int64_t num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
  if (of_block.scalar_type() != at::kInt || !of_block.is_contiguous() || of_block.numel() != num_blocks) {
    throw std::invalid_argument("zerox: `of_block` must be int32 and have " + std::to_string(num_blocks) +
                                " elements, for " + std::to_string(num_rows) + " rows");
  }
  const auto* owners = of_block.const_data_ptr<int32_t>();
  of_block_.assign(owners, owners + num_blocks);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int32_t owner = of_block_[block];
    if (owner < 0 || owner >= world) {
      throw std::invalid_argument("zerox: `of_block` names rank " + std::to_string(owner) + " of " +
                                  std::to_string(world));
    }
    places_.push_back(static_cast<int64_t>(blocks_[owner].size()) * kBlockRows);
    blocks_[owner].push_back(block);
    num_owned_[owner] += std::min(kBlockRows, num_rows - block * kBlockRows);
  }
}

void read_names(const int32_t* words, int64_t count, int64_t most, int64_t rank, const RowOwners& owners,
                std::vector<int32_t>& places) {
  const int64_t owned = owners.owned_by(rank);
  places.clear();
  if (named_by_bits(most, owned)) {
    for (int64_t i = 0; i < bit_words(owned); ++i) {
      for (auto bits = static_cast<uint32_t>(words[i]); bits != 0; bits &= bits - 1) {
        places.push_back(static_cast<int32_t>(i * kBitsAWord + std::countr_zero(bits)));
      }
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = words[i];
      const bool is_own = row >= 0 && row < owners.num_rows() && owners.owner_of(row) == rank;
      places.push_back(is_own ? static_cast<int32_t>(owners.place_of(row)) : -1);
    }
  }
  const bool ascend = std::adjacent_find(places.begin(), places.end(), std::greater_equal<>()) == places.end();
  const bool inside = places.empty() || (places.front() >= 0 && places.back() < owned);
  const auto found = static_cast<int64_t>(places.size());
  if (!ascend || !inside || found > most || (count >= 0 && found != count)) {
    throw std::runtime_error("zerox: a rank sent rows that rank " + std::to_string(rank) +
                             " does not own, or not as many as it said");
  }
}

}  // namespace zx
