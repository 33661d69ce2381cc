// In which order buckets are read, and so which are needed next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <utility>
#include <vector>

namespace zx {

// Note [What is needed next]
// A training reads its buckets in much the same order step after step, and text that is generated does so token after
// token. So the past tells what comes: the last read is found where it was read before, right after the same bucket,
// and from there on the two are followed together. Where reads leave the old way, another place is looked for. A guess
// that is wrong costs a fetch, never a value.
//
//   reads:  a b c d | d c b a | a b c d | d c b a | a b
//                               guide ----> b           next: c (after 1 read), d (2), then b (4), a (5)
//
// Room is made by releasing what is needed latest (Belady, 1966: no order of releases needs fewer fetches, if the guess
// is right), and of what the past does not tell, by what was not read for longest.

// Not thread-safe.
class ReadScript {
 public:
  static constexpr size_t kMost = 1 << 14;  // reads that are remembered
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  // Returns whether it is another bucket than at the last call.
  bool note(int64_t bucket) {
    if (!reads_.empty() && reads_.back() == bucket) return false;
    const int64_t here = first_ + static_cast<int64_t>(reads_.size());
    const std::pair key(reads_.empty() ? -1 : reads_.back(), bucket);
    if (guide_ >= first_ && guide_ + 1 < here && at(guide_ + 1) == bucket) {
      ++guide_;
    } else {
      const auto found = last_.find(key);
      guide_ = found == last_.end() ? -1 : found->second;
    }
    reads_.push_back(bucket);
    last_[key] = here;
    if (reads_.size() > kMost) forget_half();
    return true;
  }

  // By bucket: after how many other reads it is needed next; kNever if the past does not tell.
  std::vector<int64_t> next_uses(size_t num_buckets) const {
    std::vector<int64_t> uses(num_buckets, kNever);
    if (guide_ < first_) return uses;
    size_t left = num_buckets;
    const int64_t stop = first_ + static_cast<int64_t>(reads_.size());
    for (int64_t place = guide_ + 1; place < stop && left > 0; ++place) {
      int64_t& use = uses.at(at(place));
      if (use != kNever) continue;
      use = place - guide_;
      --left;
    }
    return uses;
  }

 private:
  int64_t at(int64_t place) const { return reads_[place - first_]; }

  void forget_half() {
    first_ += static_cast<int64_t>(kMost / 2);
    reads_.erase(reads_.begin(), reads_.begin() + kMost / 2);
    std::erase_if(last_, [this](const auto& each) { return each.second < first_; });
  }

  std::deque<int64_t> reads_;
  int64_t first_ = 0;   // the number of the first of them
  int64_t guide_ = -1;  // of the read in the past that the last one repeats
  std::map<std::pair<int64_t, int64_t>, int64_t>
      last_;  // of two buckets in a row: the number of the second's last read
};

}  // namespace zx
