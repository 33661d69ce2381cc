// This rank's shards of reduced gradients, once flights have been reduced.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "buckets/buckets.h"
#include "grads/flights.h"
#include "grads/in_place.h"

namespace zx {

class ReducedShards {
 public:
  ReducedShards(std::shared_ptr<Buckets> buckets, std::shared_ptr<Flights> flights)
      : buckets_(std::move(buckets)), flights_(std::move(flights)) {}

  // Once all flights launched so far have been reduced, and before any later one is: does these, or drops all shards.
  void do_in_place(std::vector<InPlace> calls);
  void drop();

  // The tensors that a shard lies in.
  std::vector<at::Tensor> tensors(int64_t bucket) const;
  // See ReducedShard.
  int64_t version(int64_t bucket) const { return buckets_->at(bucket).reduced.version; }
  const at::Tensor& present(int64_t bucket) const { return buckets_->at(bucket).reduced.present; }
  // To be called when the shard was written.
  void forget_limbs(int64_t bucket);

 private:
  std::shared_ptr<Buckets> buckets_;
  std::shared_ptr<Flights> flights_;
};

}  // namespace zx
