// Gradients whose mean is sharded: each rank keeps its shard (ZeRO stages 2 and 3).
#pragma once

#include "grads/mean_grads.h"

namespace zx {

// See Note [Who holds a gradient].
class ShardedGrads final : public MeanGrads {
 public:
  using MeanGrads::MeanGrads;

  bool precedes_accumulation(const Bucket& /*bucket*/) const override { return true; }
  void before_accumulate(const Bucket& bucket, Slot& slot, const Locked& lock) override;
  Taken take(const Bucket& bucket, Slot& slot, const at::Tensor& local, const Locked& lock) override;
  GradsSeen look(int64_t rounds, const Locked& lock) override;
  void exchange_changes(Agreement& agreement) override;
  void show(const SlotSet& seen) override;

  at::Tensor shard(int64_t bucket) override;
  std::vector<at::Tensor> shard_by_part(int64_t bucket) override { return buckets().at(bucket).reduced.by_part; }
  at::Tensor limbs(int64_t bucket) override { return buckets().at(bucket).reduced.limbs; }

 private:
  bool zeros_are_in_grad() const override { return false; }
  std::vector<uint8_t> take_changes();
};

}  // namespace zx
