#include "peers/readers_in_memory.h"

#include <exception>
#include <utility>

#include "peers/poll.h"

namespace zx {

ReadersInMemory::ReadersInMemory(std::vector<int64_t> processes, std::vector<uint64_t> control_blocks,
                                 std::shared_ptr<ControlBlock> own)
    : neighbours_(std::move(processes)), control_blocks_(std::move(control_blocks)), own_(std::move(own)) {}

ReadersInMemory::~ReadersInMemory() { ControlBlock::keep_for_others(own_); }

int64_t ReadersInMemory::word(int rank, size_t which) const {
  return word_at(neighbours_, rank, control_blocks_.at(rank), which);
}

bool ReadersInMemory::may_read(int rank) const {
  try {
    return word(rank, num_readers) > 0 && word(rank, is_at_end) == 0 && word(rank, ControlBlock::status) == 0;
  } catch (const std::exception&) {  // it is gone
    return false;
  }
}

bool ReadersInMemory::has_ended(int rank) const {
  try {
    return word(rank, is_at_end) != 0;
  } catch (const std::exception&) {  // reading it says more
    return false;
  }
}

}  // namespace zx
