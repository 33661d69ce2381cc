// Note [Buckets launch in one order]
// Ranks pair the messages of a bucket by the order in which they launch them. So every rank launches every bucket
// exactly once per backward, in one agreed order: a complete bucket waits for its turn, and incomplete ones leave when
// backward ends. The first backward uses the layout's order. Then rank 0's order of completion, with incomplete buckets
// last, is broadcast and used from then on.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace zx {

class LaunchOrder {
 public:
  // Appends a bucket after all others.
  void add_bucket() { order_.push_back(static_cast<int64_t>(order_.size())); }

  // Takes a new order, a permutation of the buckets. To be called between passes only.
  void set_order(std::vector<int64_t> order) {
    assert(order.size() == order_.size());
    order_ = std::move(order);
    set_ = true;
  }

  bool is_set() const { return set_; }

  const std::vector<int64_t>& order() const { return order_; }

  // Starts a pass in which bucket b waits for pending[b] gradients.
  void begin(std::vector<int64_t> pending) {
    assert(pending.size() == order_.size());
    pending_ = std::move(pending);
    completed_.clear();
    next_ = 0;
    held_ = false;
  }

  // From now on nothing launches before finish().
  void hold() { held_ = true; }

  // Notes that one gradient of `bucket` is ready. Returns the buckets that launch now, in order.
  std::vector<int64_t> mark(int64_t bucket) {
    if (pending_[bucket] > 0 && --pending_[bucket] == 0) completed_.push_back(bucket);
    std::vector<int64_t> launch;
    if (held_) return launch;
    while (next_ < order_.size() && pending_[order_[next_]] == 0) launch.push_back(order_[next_++]);
    return launch;
  }

  // To be called when backward is over. Returns the buckets that launch now, in order. Afterwards the pass is complete.
  std::vector<int64_t> finish() {
    std::vector<int64_t> launch(order_.begin() + static_cast<std::ptrdiff_t>(next_), order_.end());
    next_ = order_.size();
    return launch;
  }

  // Whether every bucket has left, or would have.
  bool complete() const {
    return next_ == order_.size() || std::all_of(pending_.begin(), pending_.end(), [](int64_t n) { return n == 0; });
  }

  // The order to propose after a pass: buckets as they completed, then those with absent gradients.
  std::vector<int64_t> learned() const {
    std::vector<int64_t> learned = completed_;
    std::vector<bool> seen(order_.size(), false);
    for (const int64_t bucket : learned) seen[bucket] = true;
    for (const int64_t bucket : order_) {
      if (!seen[bucket]) learned.push_back(bucket);
    }
    return learned;
  }

 private:
  std::vector<int64_t> order_;
  bool set_ = false;
  std::vector<int64_t> pending_;    // gradients a bucket still waits for
  std::vector<int64_t> completed_;  // in the order of completion
  size_t next_ = 0;                 // position in order_ of the next bucket to launch
  bool held_ = false;
};

}  // namespace zx
