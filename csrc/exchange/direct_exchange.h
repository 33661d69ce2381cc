// Every rank sends each slice directly to its owner, which sums in rank order. Slices are single messages over gloo;
// if ranks are neighbours (see neighbours.h), a message only tells where a slice lies.
#pragma once

#include "exchange/exchange.h"
#include "peers/neighbours.h"

namespace zx {

std::shared_ptr<Exchange> make_direct_exchange(Communicator comm, Neighbours neighbours);

}  // namespace zx
