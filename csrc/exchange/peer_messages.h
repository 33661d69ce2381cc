// Messages of any lengths between all ranks, for latency: each goes straight to its rank, all at once.
//
// A collective of gloo is begun by a thread of gloo's, which takes as long to wake as a small message takes to travel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "exchange/tags.h"
#include "exchange/whereabouts.h"

namespace zx {

class PeerMessages {
 public:
  // The line's group must take CPU tensors.
  explicit PeerMessages(Line line) : line_(std::move(line)) {}

  // Sends each rank its message, and returns what ranks had for this one, by rank: of as many elements as `numels`
  // says, which is what the sender passes too. This rank's own message comes back as it is. Collective; to be called by
  // one thread only. Throws std::runtime_error that names the rank that is gone.
  std::vector<at::Tensor> swap(const std::vector<at::Tensor>& sent, const std::vector<int64_t>& numels);

 private:
  Line line_;
  Tags tags_{TagKind::rows};
};

}  // namespace zx
