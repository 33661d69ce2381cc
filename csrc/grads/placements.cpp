#include "grads/placements.h"

#include <c10/util/StringUtil.h>

namespace zx {
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

SlotSet Placements::seen() const {
  if (buckets_->num_dtensors == 0) return {};
  SlotSet seen(buckets_->num_dtensors * kBitsOfSlot);
  for_each_dim(*buckets_, [&seen](const Slot& slot, int64_t dtensor, int dim) {
    if ((slot.seen.placements.partial >> dim & 1) != 0) seen.add(partial_bit(dtensor, dim));
    if ((slot.seen.placements.replicated >> dim & 1) != 0) seen.add(replicated_bit(dtensor, dim));
  });
  return seen;
}

std::string Placements::learn(const SlotSet& seen) {
  if (buckets_->num_dtensors == 0) return "";
  const Locked lock(buckets_->mutex);
  std::string clash;
  for_each_dim(*buckets_, [&](Slot& slot, int64_t dtensor, int dim) {
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

std::vector<int64_t> Placements::partial(int64_t index) const {
  const Locked lock(buckets_->mutex);
  std::vector<int64_t> found;
  bool any = false;
  for (const Slot& slot : buckets_->at(index).slots) {
    found.push_back(slot.seen.placements.partial);
    any |= found.back() != 0;
  }
  return any ? found : std::vector<int64_t>{};
}

}  // namespace zx
