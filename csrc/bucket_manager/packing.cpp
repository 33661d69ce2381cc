// From the gradients of a bucket to its packing list: what is copied where, and which flags are raised.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "bucket_manager/bucket_manager.h"
#include "bucket_manager/packing.h"
#include "bucket_manager/ranges.h"
#include "bucket_manager/straight.h"

namespace zx {

at::Tensor to_table(const std::vector<int64_t>& numbers, int64_t columns) {
  const auto count = static_cast<int64_t>(numbers.size());
  at::Tensor table = at::empty({count}, at::kLong);
  std::copy(numbers.begin(), numbers.end(), table.mutable_data_ptr<int64_t>());
  return columns > 1 ? table.view({count / columns, columns}) : table;
}

std::string refusal_of(const Slot& slot, c10::Device device) {
  const at::Tensor& grad = slot.param.grad();
  if (grad.layout() == at::kStrided && grad.sizes() == slot.home.view.sizes() && grad.device() == device) return "";
  const std::string who = "parameter '" + slot.name + "' got a ";
  if (grad.layout() != at::kStrided) {
    return who + "sparse gradient; only dense ones can be sharded (nn.Embedding: use sparse=False)";
  }
  return c10::str(who, "gradient of ", grad.sizes(), " on ", grad.device(), ", but was ", slot.home.view.sizes(),
                  " on ", device, " when the optimizer was built; build the optimizer after such a change");
}

at::Tensor in_order_of(const at::Tensor& grad, const at::Tensor& param) {
  const at::Tensor plain = grad.requires_grad() ? grad.detach() : grad;
  const bool same_order = plain.strides() == param.strides() || (plain.is_contiguous() && param.is_contiguous());
  return same_order ? plain : at::empty_like(param, plain.options()).copy_(plain);
}

namespace {

// One dimension, dense; zeros without a source.
at::Tensor in_memory_order(const at::Tensor& source, const Slot& slot, at::ScalarType dtype) {
  if (!source.defined()) return at::zeros({slot.numel()}, slot.home.view.options().dtype(dtype));
  return source.as_strided({slot.numel()}, {1}, source.storage_offset()).to(dtype);
}

}  // namespace

// Takes p.grad of a slot for a flight (undefined if there is nothing to copy) and says which flags to raise. Where
// gradients are sharded a placeholder stays behind. See Note [Who holds a gradient].
at::Tensor BucketManager::take_gradient(Slot& slot, bool& present, bool& replace) {
  at::Tensor& grad = slot.param.mutable_grad();
  if (grad.defined()) {
    std::string refusal = refusal_of(slot, options_.device);
    if (!refusal.empty()) {  // the round goes on without it, and the next settle() raises
      pass_.failure = std::move(refusal);
      present = replace = false;
      return {};
    }
  }
  if (options_.whole_grads) {
    // p.grad holds what the shard held, too.
    present = replace = grad.defined() && (slot.whole.unsent || !pass_.only_unsent);
    slot.held = present;
    slot.whole.unsent = false;
    return present ? in_order_of(grad, slot.home.view) : at::Tensor();
  }
  const bool is_placeholder = grad.defined() && grad.is_same(slot.placeholder);
  const bool is_real = grad.defined() && !is_placeholder;
  const bool discarded = slot.held && !grad.defined();
  const bool by_hand = is_real && !slot.seen.local.is(grad);
  present = is_real || slot.zeroed;
  replace = slot.replace || discarded || by_hand || slot.zeroed;
  slot.held = grad.defined();
  slot.replace = false;
  slot.zeroed = false;
  slot.seen.local.forget();
  if (replace) slot.seen.scaled.forget();  // the placeholder is the same one again
  if (!is_real) return {};
  at::Tensor taken = in_order_of(grad, slot.home.view);
  grad = slot.placeholder;
  return taken;
}

// The current stream has written a gradient of this bucket's.
void BucketManager::note_producer(Bucket& bucket) {
  const Streams* streams = flights_.streams();
  if (streams == nullptr) return;
  const c10::Stream current = streams->current();
  auto& known = bucket.producers;
  if (std::find(known.begin(), known.end(), current) == known.end()) known.push_back(current);
}

std::shared_ptr<Flight> BucketManager::make_flight(const std::shared_ptr<Bucket>& bucket, bool empty) {
  auto flight = std::make_shared<Flight>();
  flight->bucket = bucket;
  const int64_t shard_numel = bucket->shard_numel;
  std::vector<int64_t> pieces;
  std::vector<int64_t> flags;
  std::vector<int64_t> segments_before(world(),
                                       0);  // flags go behind each shard in the order of its segments
  for (Slot& slot : bucket->slots) {
    bool present = false;
    bool replace = empty;
    at::Tensor source;
    const bool stood = slot.held;
    if (!empty) source = take_gradient(slot, present, replace);
    flight->adds |= stood && !replace;
    const bool is_straight = static_cast<int64_t>(flight->straight.size()) < bucket->num_straight;
    if (is_straight) flight->straight.push_back(in_memory_order(source, slot, bucket->wire_dtype));
    const int64_t first_rank = slot.offset / shard_numel;
    const int64_t last_rank = slot.numel() == 0 ? first_rank : (slot.offset + slot.numel() - 1) / shard_numel;
    for (int64_t rank = first_rank; rank <= last_rank; ++rank) {
      // Where the slice would start in `flat`, if its straight part were there too.
      const int64_t packed = bucket->packed_start(rank) - bucket->straight_numel(rank);
      const int64_t flag = packed + shard_numel + 2 * segments_before[rank]++;
      if (present) flags.push_back(flag);
      if (replace) flags.push_back(flag + 1);
      if (!source.defined() || slot.numel() == 0 || is_straight) continue;
      const int64_t start = std::max(slot.offset, rank * shard_numel);
      const int64_t stop = std::min(slot.offset + slot.numel(), (rank + 1) * shard_numel);
      pieces.insert(pieces.end(), {static_cast<int64_t>(flight->sources.size()), start - slot.offset,
                                   packed + start - rank * shard_numel, stop - start});
    }
    if (source.defined() && !is_straight) flight->sources.push_back(std::move(source));
  }
  flight->pieces = to_table(pieces, 4);
  flight->flags = to_table(flags, 1);
  if (const Streams* streams = flights_.streams()) {
    note_producer(*bucket);  // gradients that were written by hand, or brought into order above
    flight->producers.swap(bucket->producers);
    flight->ready = streams->record(flight->producers);
  }
  return flight;
}

// `empty`: after an exception in backward a bucket leaves without gradients, to keep ranks in step.
void BucketManager::release(int64_t bucket, bool empty) {
  const Range range("launch", bucket);
  flights_.launch(make_flight(buckets_[bucket], empty));
}

const at::Tensor& BucketManager::whole_shard(int64_t index) {
  join_pieces(*buckets_.at(index));
  return buckets_[index]->landed.shard;
}

std::vector<Part> BucketManager::parts(int64_t index) const {
  return parts_of(*buckets_.at(index), rank(), std::numeric_limits<int64_t>::max());
}

}  // namespace zx
