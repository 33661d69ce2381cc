// Turns a packed flight into this rank's shard of the mean.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "exchange/exchange.h"
#include "grads/flight.h"

namespace zx {

// The pack worker calls send(), and the reduce worker calls reduce().
class Reduction {
 public:
  virtual ~Reduction() = default;

  // Starts sending what was packed. Returns what to wait for; null if nothing.
  virtual std::shared_ptr<Pending> send(Flight& flight) = 0;
  // To be called when everything has arrived: the bucket's shard becomes the mean, or the mean is added to it.
  virtual void reduce(Flight& flight) = 0;

  // Whether large gradients of the bucket are not packed: see zero_copy.h.
  virtual bool takes_zero_copy(const Bucket& bucket) const = 0;
  // Whether a flight waits for no other rank.
  virtual bool is_local(const Bucket& bucket) const = 0;
  // How many elements a part of the bucket's shard may have: any number, or if neighbours are read, what a cache
  // holds.
  virtual int64_t most_in_a_part(const Bucket& bucket) const = 0;
};

std::unique_ptr<Reduction> make_reduction(std::shared_ptr<Exchange> exchange);

// Each bucket's own: see Note [Subgroups].
class ReductionsOfSubgroups final : public Reduction {
 public:
  // The next one of Subgroup::exchange. No flight is under way.
  void add(std::unique_ptr<Reduction> reduction) { all_.push_back(std::move(reduction)); }

  std::shared_ptr<Pending> send(Flight& flight) override { return of(*flight.bucket).send(flight); }
  void reduce(Flight& flight) override { of(*flight.bucket).reduce(flight); }
  bool takes_zero_copy(const Bucket& bucket) const override { return of(bucket).takes_zero_copy(bucket); }
  bool is_local(const Bucket& bucket) const override { return of(bucket).is_local(bucket); }
  int64_t most_in_a_part(const Bucket& bucket) const override { return of(bucket).most_in_a_part(bucket); }

 private:
  Reduction& of(const Bucket& bucket) const { return *all_.at(bucket.subgroup.exchange); }

  std::vector<std::unique_ptr<Reduction>> all_;
};

}  // namespace zx
