// Turns a packed flight into this rank's shard of the mean.
#pragma once

#include <cstdint>
#include <memory>

#include "exchange/exchange.h"
#include "grads/flight.h"

namespace zx {

// The pack worker calls send(), and the land worker calls land().
class Reduction {
 public:
  virtual ~Reduction() = default;

  // Starts sending what was packed. Returns what to wait for; null if nothing.
  virtual std::shared_ptr<Pending> send(Flight& flight) = 0;
  // To be called when everything has arrived: the bucket's shard becomes the mean, or the mean is added to it.
  virtual void land(Flight& flight) = 0;

  // Whether large gradients of the bucket are not packed: see straight.h.
  virtual bool takes_straight(const Bucket& bucket) const = 0;
  // Whether a flight waits for no other rank.
  virtual bool is_local() const = 0;
  // How many elements of `bytes` each a part of a shard may have: any number, or if neighbours are read, what a cache
  // holds.
  virtual int64_t most_in_a_part(int64_t bytes) const = 0;
};

std::unique_ptr<Reduction> make_reduction(bool alone, std::shared_ptr<Exchange> exchange);

}  // namespace zx
