#include "grads/sharded_grads.h"

#include <algorithm>

#include "grads/local_grad.h"
#include "grads/packing.h"
#include "grads/zero_copy.h"

namespace zx {

void ShardedGrads::before_accumulate(const Bucket& /*bucket*/, Slot& slot, const Locked& /*lock*/) {
  at::Tensor& grad = slot.param.mutable_grad();
  if (!grad.defined()) {
    slot.replace |= slot.held;
    slot.held = false;
  } else if (grad.is_same(slot.placeholder)) {
    slot.replace |= slot.zeroed;
    slot.zeroed = false;
    grad.reset();
  } else {
    slot.replace |= !slot.seen.local.is(grad);
  }
}

// Leaves a placeholder behind.
Taken ShardedGrads::take(const Bucket& bucket, Slot& slot, const at::Tensor& local, const Locked& /*lock*/) {
  at::Tensor& grad = slot.param.mutable_grad();
  const bool is_placeholder = grad.defined() && grad.is_same(slot.placeholder);
  const bool is_real = grad.defined() && !is_placeholder;
  const bool discarded = slot.held && !grad.defined();
  const bool by_hand = is_real && !slot.seen.local.is(grad);
  Taken taken{.present = is_real || slot.zeroed, .replace = slot.replace || discarded || by_hand || slot.zeroed};
  slot.held = grad.defined();
  slot.replace = false;
  slot.zeroed = false;
  slot.seen.writers = 0;  // an accumulation that raised never ends
  slot.seen.local.forget();
  if (taken.replace) slot.seen.scaled.forget();  // the new placeholder is the same tensor as before
  if (!is_real) return taken;
  taken.source = in_order_of(local, slot.home);
  at::Tensor& placeholder = slot.placeholder;
  if (placeholder.scalar_type() != bucket.grad_dtype || placeholder.device() != slot.home.device) {
    placeholder.set_data(placeholder.to(slot.home.device, bucket.grad_dtype));  // a module took it along, and came back
  }
  grad = placeholder;
  return taken;
}

GradsSeen ShardedGrads::look(int64_t /*rounds*/, const Locked& /*lock*/) {
  GradsSeen seen{.with_grad = SlotSet(buckets().num_slots())};
  buckets().for_each_slot([&](Slot& slot, int64_t position) {
    const at::Tensor& grad = slot.param.grad();
    if (grad.defined()) {
      seen.with_grad.add(position);
      if (!grad.is_same(slot.placeholder)) {
        seen.unsent = true;
        if (seen.refusal.empty()) seen.refusal = local_grad(slot).refusal;
      }
    } else if (slot.held) {
      slot.held = false;
      slot.replace = true;
    }
    seen.scaled |= slot.seen.scaled.is(grad);
    seen.changed |= slot.replace || slot.zeroed;
  });
  return seen;
}

// Two bytes a slot: whether it was replaced, and by zeros.
std::vector<uint8_t> ShardedGrads::take_changes() {
  const Locked lock(buckets().mutex);
  std::vector<uint8_t> changes;
  buckets().for_each_slot([&](Slot& slot, int64_t /*position*/) {
    changes.push_back(slot.replace || slot.zeroed);
    changes.push_back(slot.zeroed);
    slot.replace = false;
    slot.zeroed = false;
  });
  return changes;
}

// This is rare: a flight tells most changes.
void ShardedGrads::exchange_changes(Agreement& agreement) {
  const std::vector<uint8_t> changes = told_in_subgroups(buckets(), take_changes(), 2, agreement);
  size_t at = 0;
  for (const auto& bucket : buckets().all) {
    const int64_t rank = bucket->subgroup.rank;
    const int64_t first = bucket->shards.start(rank);
    int64_t segment = 0;
    for (const Slot& slot : bucket->slots) {
      const bool replaced = changes[at++] != 0;
      const bool zeroed = changes[at++] != 0;
      const int64_t start = std::max(slot.offset, first);
      const int64_t stop = std::min(slot.offset + slot.numel(), bucket->shards.stop(rank));
      if (!bucket->owns_part_of(slot, rank)) continue;
      if (replaced && bucket->reduced.has_gradient) {
        put_together(*bucket);
        bucket->reduced.shard.narrow(0, start - first, stop - start).zero_();
        bucket->reduced.present[segment] = zeroed ? 1 : 0;
        bucket->reduced.limbs.reset();
        ++bucket->reduced.version;
      }
      ++segment;
    }
  }
}

// A placeholder stands for the mean, of which this rank's part may be nothing. Subgroups have other parameters.
void ShardedGrads::show(const SlotSet& seen) {
  const Locked lock(buckets().mutex);
  int64_t position = 0;
  for (const auto& bucket : buckets().all) {
    for (Slot& slot : bucket->slots) {
      at::Tensor& grad = slot.param.mutable_grad();
      if (!grad.defined() && !slot.replace && bucket->subgroup.count == 1 && seen.has(position)) {
        grad = slot.placeholder;
        slot.held = true;
      }
      ++position;
    }
  }
}

at::Tensor ShardedGrads::shard(int64_t index) {
  Bucket& bucket = buckets().at(index);
  put_together(bucket);
  return bucket.reduced.shard;
}

}  // namespace zx
