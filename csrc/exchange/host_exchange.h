// For an accelerator's tensors over a backend that moves host memory (gloo): messages travel through pinned buffers.
#pragma once

#include "exchange/exchange.h"

namespace zx {

// Wraps an exchange of host tensors. scatter() and gather() block the host until the current stream has copied the
// slices there. The wait() of a Pending makes the current stream copy the received slices back.
std::shared_ptr<Exchange> make_host_exchange(std::shared_ptr<Exchange> on_host);

}  // namespace zx
