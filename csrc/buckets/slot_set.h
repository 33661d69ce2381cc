// A set of slots: one bit for each slot of all buckets, in order.
#pragma once

#include <cstdint>
#include <vector>

namespace zx {

class SlotSet {
 public:
  SlotSet() = default;
  explicit SlotSet(int64_t count) : words_((count + 63) / 64) {}
  explicit SlotSet(std::vector<int64_t> words) : words_(std::move(words)) {}

  void add(int64_t slot) { words_[slot / 64] |= bit(slot); }
  bool has(int64_t slot) const { return (words_[slot / 64] & bit(slot)) != 0; }

  // The set as it travels: the union of two sets is the bitwise or of their words.
  const std::vector<int64_t>& words() const { return words_; }

 private:
  static int64_t bit(int64_t slot) { return static_cast<int64_t>(uint64_t{1} << (slot % 64)); }

  std::vector<int64_t> words_;
};

}  // namespace zx
