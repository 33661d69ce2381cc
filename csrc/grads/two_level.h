// The reduction over a mesh of two axes: see Note [Two levels] in exchange/two_level_exchange.h.
#pragma once

#include <memory>

#include "exchange/exchange.h"
#include "grads/reduction.h"

namespace zx {

// Note [Sums that wait]
// Inside no_sync(outer=True) a flight ends on the inner axis: its sums are added to those that wait in
// ReducedShard::left, float32 and not rounded, for the N shards of this rank's column of owners. The next flight
// outside takes them along. As where it is reduced, a gradient that replaces what was there before replaces what waits
// too: the flags travel with the sums, and add up. But those flags don't come to other columns: so all ranks must
// discard alike while sums wait, which they compare where they synchronize.
std::unique_ptr<Reduction> make_two_level_reduction(std::shared_ptr<Exchange> inner, std::shared_ptr<Exchange> outer);

}  // namespace zx
