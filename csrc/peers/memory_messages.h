// Messages of any lengths between ranks of one machine, for latency: they are not sent, but read where they lie.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "peers/control_block.h"
#include "peers/failure_detector.h"
#include "peers/neighbours.h"
#include "peers/tags.h"

namespace zx {

// Note [Ranks of one machine synchronize in memory]
// A message of gloo's wakes four threads one after the other, through the kernel: 120 to 220 us between two ranks that
// are both there. Ranks that can read each other's memory (Note [Neighbours]) need none of that. Each has a
// ControlBlock, in which it writes where its messages of round n lie, and then n. The others look until they find n
// there, copy their messages, and write n into `taken` of their own control blocks; a round is over when all have. So a
// control block has the messages of one round, no rank is more than one round ahead, and a rank may end right after the
// last round.
//
// Sequence numbers are never reused, so a torn read cannot match.
//
// Readers poll; nothing wakes them. So a rank that gives up (Note [A rank that gives up says so]) also sets a flag in
// its control blocks, before the memory of its messages is freed: a reader that sees the flag discards its copy. The
// memory of a process that is gone can't be read.
class MemoryMessages {
 public:
  // `tag`: of the communicator's group, for the control blocks' addresses.
  MemoryMessages(const Communicator& comm, Tag tag) : comm_(comm), tag_(tag) {}
  ~MemoryMessages();
  MemoryMessages(const MemoryMessages&) = delete;

  // Whether each rank of the communicator can read each other one's memory. The same on all ranks.
  bool can_serve();

  // `sent`: the message for each rank; `into`: where those of all go, as long as their senders have them; this rank's
  // own is left alone. Collective; to be called by one thread only, where can_serve(). Throws std::runtime_error that
  // names the rank that is gone.
  void swap(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& into);

 private:
  // Of a control block.
  enum Word : size_t {
    published = ControlBlock::first_free,  // the round whose messages lie at `addresses`
    taken,                                 // the last round whose messages this rank has
    addresses,                             // of the message for each rank
  };

  void exchange_addresses();
  void poll_for(int rank, Word word) const;
  void take(int rank, const at::Tensor& into) const;

  const Communicator& comm_;
  Tag tag_;
  std::shared_ptr<ControlBlock> own_{};  // null until ranks have synchronized
  Neighbours neighbours_{};
  std::vector<uint64_t> control_blocks_{};  // their addresses, by rank
  int64_t round_ = 0;
};

}  // namespace zx
