// The exchange of one rank: what it sends has arrived.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace zx {

std::shared_ptr<Exchange> make_alone_exchange();

}  // namespace zx
