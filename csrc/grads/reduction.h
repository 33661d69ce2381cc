// Turns a packed flight into this rank's shard of the mean.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

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
  virtual bool is_local(const Bucket& bucket) const = 0;
  // How many elements a part of the bucket's shard may have: any number, or if neighbours are read, what a cache
  // holds.
  virtual int64_t most_in_a_part(const Bucket& bucket) const = 0;
};

std::unique_ptr<Reduction> make_reduction(std::shared_ptr<Exchange> exchange);

// Each bucket's own: see Note [Teams].
class ReductionsOfTeams final : public Reduction {
 public:
  // The next one of Team::exchange. No flight is under way.
  void add(std::unique_ptr<Reduction> reduction) { all_.push_back(std::move(reduction)); }

  std::shared_ptr<Pending> send(Flight& flight) override { return of(*flight.bucket).send(flight); }
  void land(Flight& flight) override { of(*flight.bucket).land(flight); }
  bool takes_straight(const Bucket& bucket) const override { return of(bucket).takes_straight(bucket); }
  bool is_local(const Bucket& bucket) const override { return of(bucket).is_local(bucket); }
  int64_t most_in_a_part(const Bucket& bucket) const override { return of(bucket).most_in_a_part(bucket); }

 private:
  Reduction& of(const Bucket& bucket) const { return *all_.at(bucket.team.exchange); }

  std::vector<std::unique_ptr<Reduction>> all_;
};

}  // namespace zx
