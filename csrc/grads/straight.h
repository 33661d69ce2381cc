// Gradients that are sent as they are, without being packed.
#pragma once

#include <vector>

#include "exchange/exchange.h"
#include "grads/flight.h"

namespace zx {

// Note [Straight from the gradient]
// Where the exchange sends single messages, a copy into the flat buffer would only cost time and memory for large
// gradients: the first `num_straight` slots of a bucket, which lie in front, are sent from where autograd left them.
// The rest of each slice, flags included, is packed and is one message:
//
//   slice of rank r   | A A A A A | B B B | c d . e . . | flags |
//   messages to r       A's part    B's part  packed
//
// What is received arrives in its place in a whole slice, what stays with a neighbour is read part by part, into memory
// that is still in the cache when it is added; the own contribution is still in the gradient. All ranks send the same
// messages, zeros where there is no gradient.

// Note [Alone, gradients stay where they are]
// One rank's large gradients are the mean already. On the CPU, where step() is as fast as memory is, packing them would
// cost half as much again: they are kept as the shard's pieces, for step() and norms to read, and put together only
// where something is added to them or taken from them. Nothing is written to them: whoever else holds one would see it.
// Where gradients stay whole (ZeRO stage 1) the mean lies in p.grad on any number of ranks, and is read from there.

// Whether the bucket's straight slots stay where they are on one rank alone.
bool stay_in_place(const Bucket& bucket);

// Puts together what landed in pieces.
void join_pieces(Bucket& bucket);

// The shard's parts, of `most` elements at most.
std::vector<Part> parts_of(const Bucket& bucket, int64_t rank, int64_t most);

// Starts sending the flight's straight gradients and what was packed; what comes goes to flight.received.
std::shared_ptr<Pending> send_straight(Exchange& exchange, const Flight& flight);

// For each rank: what it contributes to this one's slice, as messages; none where they stay with it.
std::vector<Exchange::Messages> contributions(const Exchange& exchange, const Flight& flight);

}  // namespace zx
