#include "grads/reduced_shards.h"

namespace zx {

void ReducedShards::do_in_place(std::vector<InPlace> calls) {
  flights_->after_reduction([buckets = buckets_, calls = std::move(calls)] {
    for (const InPlace& call : calls) zx::do_in_place(buckets->at(call.bucket), call);
  });
}

void ReducedShards::drop() {
  flights_->after_reduction([all = buckets_->all] {
    for (const auto& bucket : all) {
      ReducedShard& reduced = bucket->reduced;
      reduced.has_gradient = false;
      reduced.by_part.clear();
      if (!reduced.keeps_shard) reduced.shard.reset();
      reduced.limbs.reset();
      reduced.left.reset();
      reduced.present.zero_();
      ++reduced.version;
    }
  });
}

std::vector<at::Tensor> ReducedShards::tensors(int64_t index) const {
  const ReducedShard& reduced = buckets_->at(index).reduced;
  if (!reduced.by_part.empty() || !reduced.shard.defined()) return reduced.by_part;
  return {reduced.shard};
}

void ReducedShards::forget_limbs(int64_t bucket) {
  ReducedShard& reduced = buckets_->at(bucket).reduced;
  reduced.limbs.reset();
  ++reduced.version;
}

}  // namespace zx
