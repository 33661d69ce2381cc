// From a flight that is packed to this rank's shard of the mean.
#pragma once

#include <cstdint>
#include <memory>

#include "exchange/exchange.h"
#include "grads/flight.h"

namespace zx {

// send() is the pack lane's, land() the land lane's.
class Reduction {
 public:
  virtual ~Reduction() = default;

  // Starts sending what was packed. Returns what is to be waited for; null: nothing.
  virtual std::shared_ptr<Pending> send(Flight& flight) = 0;
  // All has arrived: the bucket's shard becomes the mean, or the mean is added to it.
  virtual void land(Flight& flight) = 0;

  // Whether large gradients of the bucket are not packed: see straight.h.
  virtual bool takes_straight(const Bucket& bucket) const = 0;
  // Whether a flight waits for nobody.
  virtual bool is_local() const = 0;
  // Elements of `bytes` each that a part of a shard may have: all, or where neighbours are read, what a cache holds.
  virtual int64_t most_in_a_part(int64_t bytes) const = 0;
};

std::unique_ptr<Reduction> make_reduction(bool alone, std::shared_ptr<Exchange> exchange);

}  // namespace zx
