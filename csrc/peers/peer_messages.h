// Messages of any lengths between all ranks, for latency: each goes directly to its rank, all at once. Ranks of one
// machine read each other's: see Note [Ranks of one machine synchronize in memory].
//
// A collective of gloo is begun by a thread of gloo's, which takes as long to wake as a small message takes to travel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "peers/failure_detector.h"
#include "peers/memory_messages.h"
#include "peers/tags.h"
#include "peers/traffic.h"

namespace zx {

class PeerMessages {
 public:
  // The communicator's group must take CPU tensors.
  explicit PeerMessages(Communicator comm) : comm_(std::move(comm)) {}

  const Communicator& comm() const { return comm_; }
  int rank() const { return comm_.group ? comm_.group->getRank() : 0; }
  int world() const { return comm_.group ? comm_.group->getSize() : 1; }

  // Whether ranks read each other's messages instead of sending them. The same on all ranks.
  bool are_in_memory() { return memory_.can_serve(); }

  // Sends each rank its message, and returns what ranks had for this one, by rank: of as many elements as `numels`
  // says, which is what the sender passes too. This rank's own message comes back as it is. Collective; to be called by
  // one thread only. Throws std::runtime_error that names the rank that is gone.
  std::vector<at::Tensor> swap(const std::vector<at::Tensor>& sent, const std::vector<int64_t>& numels);
  // The same message for each, of one length on all ranks.
  std::vector<at::Tensor> to_all(const at::Tensor& message);

  // What this rank has sent to others, or lent to one to read.
  const Traffic& traffic() const { return traffic_; }
  void count(const at::Tensor& message);

 private:
  Communicator comm_;
  Tags tags_{TagKind::rows};
  MemoryMessages memory_{comm_, tags_.next()};
  Traffic traffic_;
};

}  // namespace zx
