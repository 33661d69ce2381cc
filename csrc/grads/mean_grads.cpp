#include "grads/mean_grads.h"

#include <utility>

#include "check.h"
#include "grads/local_grad.h"
#include "grads/sharded_grads.h"
#include "grads/whole_grads.h"

namespace zx {

void MeanGrads::zero(bool set_to_none, int64_t rounds) {
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
      zero_grad_of(slot);
    }
  });
  if (set_to_none || zeros_are_in_grad()) reduced_shards_.drop();
}

void MeanGrads::mark_scaled() {
  const Locked lock(buckets().mutex);
  buckets().for_each_slot([](Slot& slot, int64_t /*position*/) { slot.seen.scaled.note(slot.param.grad()); });
}

void MeanGrads::mark_zeroed(int64_t bucket, int64_t slot) {
  const Locked lock(buckets().mutex);
  buckets().at(bucket).slots.at(slot).zeroed = true;
}

bool MeanGrads::is_zeroed(int64_t bucket, int64_t slot) const {
  const Locked lock(buckets().mutex);
  return buckets().at(bucket).slots.at(slot).zeroed;
}

// All ranks send the bytes of all subgroups, with zeros for those that they are not in.
std::vector<uint8_t> told_in_subgroups(const Buckets& buckets, const std::vector<uint8_t>& own, int64_t each,
                                       Agreement& agreement) {
  const auto for_each_byte = [&](const auto& call) {
    int64_t byte = 0;
    int64_t place = 0;
    for (const auto& bucket : buckets.all) {
      const Subgroup& subgroup = bucket->subgroup;
      const int64_t count = each * static_cast<int64_t>(bucket->slots.size());
      for (int64_t i = 0; i < count; ++i, place += subgroup.count) call(byte++, place + subgroup.number);
    }
    return place;
  };
  std::vector<uint8_t> said(for_each_byte([](int64_t, int64_t) {}), 0);
  for_each_byte([&](int64_t byte, int64_t place) { said[place] = own.at(byte); });
  agreement.take_largest(said);
  std::vector<uint8_t> told(own.size());
  for_each_byte([&](int64_t byte, int64_t place) { told[byte] = said[place]; });
  return told;
}

std::shared_ptr<MeanGrads> make_mean_grads(const std::vector<Move>& route, bool alone, GradContext context) {
  const bool gathers = route == std::vector{Move::reduce_scatter, Move::all_gather};
  TORCH_CHECK(gathers || route == std::vector{Move::reduce_scatter},
              "zerox: route must be reduce_scatter, or reduce_scatter and all_gather");
  if (!gathers) return std::make_shared<ShardedGrads>(std::move(context));
  if (alone) return std::make_shared<WholeGrads>(std::move(context));
  return std::make_shared<GatheredGrads>(std::move(context));
}

}  // namespace zx
