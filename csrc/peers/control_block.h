// Numbers that a rank lets its neighbours read: see memory_messages.h, flight_log.h and linger.h.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace zx {

class ControlBlock {
 public:
  // The words of control blocks that FailureDetector knows.
  enum Word : size_t {
    status,  // 0, or one of these two
    first_free,
  };
  static constexpr int64_t kGaveUp = 1;  // this rank answers nobody any more, and what it had may be free
  static constexpr int64_t kEnded = 2;   // its script is at its end: what stands here is all that there will be

  explicit ControlBlock(size_t num_words) : words_(num_words) {}

  std::atomic<int64_t>& operator[](size_t word) { return words_[word]; }
  uint64_t address() const { return reinterpret_cast<uint64_t>(words_.data()); }
  static size_t offset_of(size_t word) { return word * sizeof(std::atomic<int64_t>); }

  // Others may look into it a little after its owner is gone: keeps the last ones.
  static void keep_for_others(std::shared_ptr<ControlBlock> control_block);

 private:
  std::vector<std::atomic<int64_t>> words_;  // all 0
};

static_assert(sizeof(std::atomic<int64_t>) == sizeof(int64_t), "others read plain numbers");

}  // namespace zx
