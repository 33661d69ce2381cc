#include "peers/control_block.h"

#include <deque>
#include <mutex>
#include <utility>

#include "locks.h"

namespace zx {

void ControlBlock::keep_for_others(std::shared_ptr<ControlBlock> control_block) {
  constexpr size_t kKept = 256;  // of a dozen an optimizer: nobody is so many optimizers behind
  static auto* const mutex = new Mutex<LockRank::gone_control_blocks>;  // leaked, with what it guards
  static auto* const kept = new std::deque<std::shared_ptr<ControlBlock>>;
  const std::lock_guard lock(*mutex);
  kept->push_back(std::move(control_block));
  if (kept->size() > kKept) kept->pop_front();
}

}  // namespace zx
