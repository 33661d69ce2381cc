// Gradients that are sent as they are, without being packed.
#pragma once

#include <vector>

#include "exchange/exchange.h"
#include "grads/flight.h"

namespace zx {

// Note [Zero-copy from the gradient]
// If the exchange sends single messages, a copy of large gradients into the flat buffer would only cost time and
// memory. So the first `num_zero_copy` slots of a bucket, which lie in front of its shards, are sent from where
// autograd left them. The rest of each slice, flags included, is packed into one message:
//
//   slice of rank r   | A A A A A | B B B | c d . e . . | flags |
//   messages to r       A's part    B's part  packed
//
// A message that is received arrives in its place in a whole slice. A message that stays with a neighbour is read part
// by part, into memory that is still in the cache when it is added. This rank's own contribution is still in the
// gradient. All ranks send the same messages, with zeros where there is no gradient.

// Note [Alone, gradients stay where they are]
// With one rank alone, large gradients are the mean already. On the CPU step() is as fast as memory, and packing them
// would cost half as much again. So they are kept as tensors, one for each part of the shard, for step() and norms to
// read, and are put together only if something is added to them or taken from them. Nothing is written to them: others
// that hold one would see it. If gradients stay whole (ZeRO stage 1), the mean lies in p.grad on any number of ranks,
// and is read from there.

// Whether, with one rank alone, the bucket's zero-copy slots stay where they are.
bool stay_in_place(const Bucket& bucket);

// Makes one tensor of a shard that was reduced part by part.
void put_together(Bucket& bucket);

// The shard's parts, each of at most `most` elements.
std::vector<Part> parts_of(const Bucket& bucket, int64_t rank, int64_t most);

// Starts sending the flight's zero-copy gradients and what was packed. What arrives goes to flight.received.
std::shared_ptr<Pending> send_zero_copy(Exchange& exchange, const Flight& flight);

// For each rank: its contribution to this rank's slice, as messages; none if they stay with that rank.
std::vector<Exchange::Messages> contributions(const Exchange& exchange, const Flight& flight);

}  // namespace zx
