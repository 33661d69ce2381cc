// How a bucket is cut into shards, one a rank, and where their slices lie on the wire.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace zx {

// Shards have one length, unless parameters lie whole with their owners: zerox/plan/layout.py. A slice is a shard, less
// what is sent without being packed, and behind it the flags of its segments.
class Shards {
 public:
  Shards() = default;
  // `starts`: of each rank's shard in the bucket, and the end of the last. `trailer_numel`: elements for flags.
  Shards(std::vector<int64_t> starts, int64_t trailer_numel)
      : starts_(std::move(starts)), trailer_numel_(trailer_numel), zero_copy_(starts_.size() - 1, 0) {
    TORCH_INTERNAL_ASSERT(starts_.size() >= 2 && std::is_sorted(starts_.begin(), starts_.end()));
    find_packed();
  }

  int64_t world() const { return static_cast<int64_t>(starts_.size()) - 1; }
  int64_t numel() const { return starts_.back(); }  // of all
  at::IntArrayRef starts() const { return starts_; }
  int64_t start(int64_t rank) const { return starts_[rank]; }
  int64_t stop(int64_t rank) const { return starts_[rank + 1]; }
  int64_t numel(int64_t rank) const { return stop(rank) - start(rank); }
  int64_t trailer_numel() const { return trailer_numel_; }
  int64_t slice_numel(int64_t rank) const { return numel(rank) + trailer_numel_; }

  // The rank in whose shard an element of the bucket lies.
  int64_t rank_of(int64_t element) const {
    return std::upper_bound(starts_.begin() + 1, starts_.end() - 1, element) - starts_.begin() - 1;
  }
  bool are_equal() const {
    for (int64_t rank = 1; rank < world(); ++rank) {
      if (numel(rank) != numel(0)) return false;
    }
    return true;
  }

  // How many elements of each rank's shard zero-copy slots take. The packed elements lie after them.
  void set_zero_copy(std::vector<int64_t> numels) {
    TORCH_INTERNAL_ASSERT(numels.size() == zero_copy_.size());
    zero_copy_ = std::move(numels);
    find_packed();
  }
  int64_t zero_copy_numel(int64_t rank) const { return zero_copy_[rank]; }
  // The start of the packed part of each rank's slice in a flight's `flat`, and the end of that.
  at::IntArrayRef packed_starts() const { return packed_starts_; }
  int64_t packed_start(int64_t rank) const { return packed_starts_[rank]; }

 private:
  void find_packed() {
    packed_starts_.assign(1, 0);
    for (int64_t rank = 0; rank < world(); ++rank) {
      packed_starts_.push_back(packed_starts_.back() + slice_numel(rank) - zero_copy_[rank]);
    }
  }

  std::vector<int64_t> starts_{};
  int64_t trailer_numel_ = 0;
  std::vector<int64_t> zero_copy_{};
  std::vector<int64_t> packed_starts_{};
};

}  // namespace zx
