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
  if (!set_to_none && !zeros_are_in_grad()) return;
  flights().after_reduction([all = buckets().all] {
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

void MeanGrads::mark_scaled() {
  const Locked lock(buckets().mutex);
  buckets().for_each_slot([](Slot& slot, int64_t /*position*/) { slot.seen.scaled.note(slot.param.grad()); });
}

void MeanGrads::do_in_place(std::vector<InPlace> calls) {
  flights().after_reduction([buckets = context_.buckets, calls = std::move(calls)] {
    for (const InPlace& call : calls) zx::do_in_place(buckets->at(call.bucket), call);
  });
}

void MeanGrads::mark_zeroed(int64_t bucket, int64_t slot) {
  const Locked lock(buckets().mutex);
  buckets().at(bucket).slots.at(slot).zeroed = true;
}

bool MeanGrads::is_zeroed(int64_t bucket, int64_t slot) const {
  const Locked lock(buckets().mutex);
  return buckets().at(bucket).slots.at(slot).zeroed;
}

namespace {

// Of a DTensor's mesh dimension: where its bits lie in the set.
constexpr int64_t kBitsOfSlot = 2 * SeenPlacements::kMostDims;
int64_t partial_bit(int64_t dtensor, int dim) { return dtensor * kBitsOfSlot + 2 * dim; }
int64_t replicated_bit(int64_t dtensor, int dim) { return partial_bit(dtensor, dim) + 1; }

// Calls each(slot, its position among the DTensors, the dimension).
template <class Each>
void for_each_dim(const Buckets& buckets, const Each& each) {
  int64_t dtensor = 0;
  buckets.for_each_slot([&](Slot& slot, int64_t /*position*/) {
    if (!slot.home.is_of_dtensor) return;
    for (int dim = 0; dim < SeenPlacements::kMostDims; ++dim) each(slot, dtensor, dim);
    ++dtensor;
  });
}

}  // namespace

SlotSet MeanGrads::seen_placements() const {
  if (buckets().num_dtensors == 0) return {};
  SlotSet seen(buckets().num_dtensors * kBitsOfSlot);
  for_each_dim(buckets(), [&seen](const Slot& slot, int64_t dtensor, int dim) {
    if ((slot.seen.placements.partial >> dim & 1) != 0) seen.add(partial_bit(dtensor, dim));
    if ((slot.seen.placements.replicated >> dim & 1) != 0) seen.add(replicated_bit(dtensor, dim));
  });
  return seen;
}

std::string MeanGrads::learn_placements(const SlotSet& seen) {
  if (buckets().num_dtensors == 0) return "";
  const Locked lock(buckets().mutex);
  std::string clash;
  for_each_dim(buckets(), [&](Slot& slot, int64_t dtensor, int dim) {
    const bool partial = seen.has(partial_bit(dtensor, dim));
    const bool replicated = seen.has(replicated_bit(dtensor, dim));
    SeenPlacements& known = slot.seen.placements;
    known.partial |= static_cast<uint8_t>((partial ? 1 : 0) << dim);
    known.replicated |= static_cast<uint8_t>((replicated ? 1 : 0) << dim);
    if (partial && replicated && clash.empty()) {
      clash = c10::str("the gradients of parameter '", slot.name, "' came as Partial(sum) and as Replicate over axis ",
                       dim, " of its mesh, in several backwards or on several ranks: they must come alike");
    }
  });
  return clash;
}

std::vector<int64_t> MeanGrads::partial(int64_t index) const {
  const Locked lock(buckets().mutex);
  std::vector<int64_t> found;
  bool any = false;
  for (const Slot& slot : buckets().at(index).slots) {
    found.push_back(slot.seen.placements.partial);
    any |= found.back() != 0;
  }
  return any ? found : std::vector<int64_t>{};
}

std::vector<at::Tensor> MeanGrads::reduced(int64_t index) const {
  const ReducedShard& reduced = buckets().at(index).reduced;
  if (!reduced.by_part.empty() || !reduced.shard.defined()) return reduced.by_part;
  return {reduced.shard};
}

// All ranks send the bytes of all subgroups, with zeros for those that they are not in.
std::vector<uint8_t> MeanGrads::told_in_subgroups(const std::vector<uint8_t>& own, int64_t each,
                                                  Agreement& agreement) const {
  const auto for_each_byte = [&](const auto& call) {
    int64_t byte = 0;
    int64_t place = 0;
    for (const auto& bucket : buckets().all) {
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
