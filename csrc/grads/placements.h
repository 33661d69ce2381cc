// How gradients of DTensors came: as parts of a sum over a dimension of their mesh, or as the same on all of it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "buckets/buckets.h"
#include "buckets/slot_set.h"

namespace zx {

// Under Buckets::mutex, which learn() and partial() take. See Note [Local tensors].
class Placements {
 public:
  explicit Placements(std::shared_ptr<Buckets> buckets) : buckets_(std::move(buckets)) {}

  // What this rank has seen, as it tells the others.
  SlotSet seen() const;
  // Takes over what all ranks have seen. Returns what they disagree about, the same on all; empty if nothing.
  std::string learn(const SlotSet& seen);
  // For each slot, the dimensions of its mesh over which its gradients are Partial, as bits; empty if none are.
  std::vector<int64_t> partial(int64_t bucket) const;

 private:
  std::shared_ptr<Buckets> buckets_;
};

}  // namespace zx
