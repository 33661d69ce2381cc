// Every rank sends each slice straight to its owner, which sums in rank order: single messages over gloo, or where
// ranks are neighbours (see neighbours.h) only word of where they lie.
#pragma once

#include "exchange/exchange.h"
#include "exchange/neighbours.h"

namespace zx {

std::shared_ptr<Exchange> make_direct_exchange(Line line, Neighbours neighbours);

}  // namespace zx
