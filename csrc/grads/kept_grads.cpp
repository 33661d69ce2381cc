#include "grads/kept_grads.h"

#include "grads/sharded_grads.h"
#include "grads/whole_grads.h"

namespace zx {

void KeptGrads::zero(bool set_to_none, int64_t rounds) {
  const Locked lock(buckets().mutex);
  buckets().for_each_slot([&](Slot& slot, int64_t /*position*/) {
    at::Tensor& grad = slot.param.mutable_grad();
    // After a round every owner may hold a gradient of this parameter, whether or not this rank contributed to it.
    slot.replace |= slot.held || rounds > 0;
    const bool is_placeholder = grad.defined() && slot.placeholder.defined() && grad.is_same(slot.placeholder);
    slot.whole.reached = slot.whole.is_undone = false;
    slot.seen.writers = 0;
    if (set_to_none) {
      slot.held = slot.zeroed = false;
      slot.seen.local.forget();
      grad.reset();
    } else if (is_placeholder) {
      slot.zeroed = true;
    } else if (grad.defined()) {
      grad.detach_().zero_();
    }
  });
  if (!set_to_none && !zeros_are_in_grad()) return;
  flights().after_landing([all = buckets().all] {
    for (const auto& bucket : all) {
      Landed& landed = bucket->landed;
      landed.holds = false;
      landed.pieces.clear();
      if (!landed.keeps_shard) landed.shard.reset();
      landed.words.reset();
      landed.left.reset();
      landed.present.zero_();
    }
  });
}

void KeptGrads::mark_scaled() {
  const Locked lock(buckets().mutex);
  buckets().for_each_slot([](Slot& slot, int64_t /*position*/) { slot.seen.scaled.note(slot.param.grad()); });
}

void KeptGrads::mark_zeroed(int64_t bucket, int64_t slot) {
  const Locked lock(buckets().mutex);
  buckets().at(bucket).slots.at(slot).zeroed = true;
}

std::vector<at::Tensor> KeptGrads::landed(int64_t index) const {
  const Landed& landed = buckets().at(index).landed;
  if (!landed.pieces.empty() || !landed.shard.defined()) return landed.pieces;
  return {landed.shard};
}

std::shared_ptr<KeptGrads> make_kept_grads(const std::vector<Move>& route, bool alone, GradContext context) {
  const bool gathers = route == std::vector{Move::reduce_scatter, Move::all_gather};
  TORCH_CHECK(gathers || route == std::vector{Move::reduce_scatter},
              "zerox: route must be reduce_scatter, or reduce_scatter and all_gather");
  if (!gathers) return std::make_shared<ShardedGrads>(std::move(context));
  if (alone) return std::make_shared<WholeGrads>(std::move(context));
  return std::make_shared<GatheredGrads>(std::move(context));
}

}  // namespace zx
