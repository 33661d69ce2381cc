// A message to each rank and one from each, by messages of the group.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "peers/failure_detector.h"
#include "peers/tags.h"

namespace zx {

// Each rank's message for this one goes into its tensor of `into`; empty ones are not sent, and this rank's own is left
// alone. Collective; throws std::runtime_error that names the rank that is gone.
void send_to_peers(const Communicator& comm, Tag tag, const std::vector<at::Tensor>& sent,
                   const std::vector<at::Tensor>& into);

}  // namespace zx
