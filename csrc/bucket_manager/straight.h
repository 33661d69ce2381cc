// Gradients that are sent as they are, without being packed.
#pragma once

#include <vector>

#include "bucket_manager/exchange.h"
#include "bucket_manager/flight.h"

namespace zx {

// Note [Straight from the gradient]
// Where the exchange sends single messages, a copy into the flat buffer would only cost time and memory for large
// gradients: the first `num_straight` slots of a bucket, which lie in front, are sent from where autograd left them.
// The rest of each slice, flags included, is packed and is one message:
//
//   slice of rank r   | A A A A A | B B B | c d . e . . | flags |
//   messages to r       A's part    B's part  packed
//
// The parts arrive in their places in a whole slice, and are reduced one by one: the own one is still in the gradient.
// All ranks send the same messages, zeros where there is no gradient.

std::vector<Part> parts_of(const Bucket& bucket, int64_t rank);

// Starts sending the flight's straight gradients and what was packed; what comes goes to flight.received.
std::shared_ptr<Pending> send_straight(Exchange& exchange, const Flight& flight);

// For each part: the slices whose sum is the reduced one, in rank order. The last part's have the flags behind them.
std::vector<std::vector<at::Tensor>> parts_to_sum(const Exchange& exchange, const Flight& flight);

}  // namespace zx
