// For an accelerator's tensors over a backend that moves host memory (gloo): messages travel through pinned buffers.
#pragma once

#include "exchange/exchange.h"

namespace zx {

// Wraps an exchange of host tensors. scatter() and gather() wait on the host until the current stream has brought the
// slices there; a Pending's wait() has the current stream take the received ones back.
std::shared_ptr<Exchange> make_staged_exchange(std::shared_ptr<Exchange> on_host);

}  // namespace zx
