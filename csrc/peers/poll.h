// Looks into control blocks of neighbours (control_block.h) until something stands there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "locks.h"
#include "peers/control_block.h"
#include "peers/failure_detector.h"
#include "peers/neighbours.h"
#include "peers/pause.h"

namespace zx {

// A rank is looked for that will not come. It looks as if its connection had ended, and so errors say.
class GaveUp : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

constexpr const char* kHasEnded = "it has come to the end of its script";

// A word of what begins at `address` in a rank's memory.
inline int64_t word_at(const Neighbours& neighbours, int rank, uint64_t address, size_t word) {
  int64_t found = 0;
  neighbours.read(rank, address + ControlBlock::offset_of(word), &found, sizeof(found));
  return found;
}

// After something of a rank was read. Throws GaveUp if it is not to be trusted, since its memory may have been free.
inline void check_read(const Neighbours& neighbours, int rank, uint64_t control_block) {
  if (word_at(neighbours, rank, control_block, ControlBlock::status) == ControlBlock::kGaveUp)
    throw GaveUp("it gave up while it was read");
}

// Waits for found(), which looks into the memory of a rank with this control block, or for is_stopped(); returns
// whether it was found. Throws GaveUp if it never will be. `own`: this rank's control block.
template <class Found, class IsStopped>
bool poll(const Neighbours& neighbours, int rank, uint64_t control_block, ControlBlock& own,
          const FailureDetector& failure_detector, const Found& found, const IsStopped& is_stopped) {
  check_may_wait("a neighbour");
  Pause pause;
  while (true) {
    if (own[ControlBlock::status] != 0) throw std::runtime_error("this rank gave up");  // in another thread
    int64_t status = 0;
    try {
      if (found()) break;
      status = word_at(neighbours, rank, control_block, ControlBlock::status);
      if (status == ControlBlock::kEnded && found()) break;  // it came before
    } catch (const std::exception& error) {
      throw GaveUp(error.what());
    }
    if (status == ControlBlock::kEnded) throw GaveUp(kHasEnded);
    if (status != 0) throw GaveUp("it gave up");
    if (is_stopped()) return false;
    if (pause.waited() > failure_detector.timeout()) throw std::runtime_error("timed out");
    LongWait::check();
    pause();
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);  // what was found stands for is read after it
  return true;
}

}  // namespace zx
