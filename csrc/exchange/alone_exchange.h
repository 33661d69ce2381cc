// The exchange of one rank alone: nothing has to be sent.
#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace zx {

std::shared_ptr<Exchange> make_alone_exchange();

}  // namespace zx
