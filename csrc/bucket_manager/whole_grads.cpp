// Gradients that stay whole (ZeRO stage 1): the mean is gathered into p.grad when backward ends, and the update takes
// this rank's part from there, so that whatever the user changed in between counts.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>

#include "bucket_manager/bucket_manager.h"
#include "bucket_manager/ops.h"
#include "bucket_manager/packing.h"
#include "bucket_manager/ranges.h"
#include "check.h"

namespace zx {
namespace {

at::Tensor shaped_like(const at::Tensor& flat, const Slot& slot) {
  return flat.as_strided(slot.home.view.sizes(), slot.home.view.strides(), flat.storage_offset() + slot.offset);
}

}  // namespace

void BucketManager::gather_whole_grads() {
  if (pass_.gathered == pass_.rounds) return;
  pass_.gathered = pass_.rounds;
  flights_.land();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;

  // A rank that had no gradient of its own gets the others'.
  enum : uint8_t { kAbsent, kPresent, kReached };
  std::vector<uint8_t> present;
  for (const auto& bucket : buckets_) {
    for (Slot& slot : bucket->slots) {
      present.push_back(!slot.held ? kAbsent : slot.fired ? kReached : kPresent);
      slot.fired = false;  // in the next round, which may be another rank's
    }
  }
  ask(name_of(static_cast<int64_t>(Place::backward_end)), [&] { agreement_.take_largest(present); });

  std::vector<at::Tensor> whole;
  Gathers gathers({"the mean gradients", "gather_grads", "gather_grads_wait"});
  for (const auto& bucket : buckets_) {
    at::Tensor flat = at::empty({world() * bucket->shard_numel}, bucket->flat.options().dtype(bucket->grad_dtype));
    at::Tensor own = flat.narrow(0, rank() * bucket->shard_numel, bucket->shard_numel);
    if (bucket->landed.shard.defined()) {
      own.copy_(bucket->landed.shard);
    } else {
      own.zero_();  // zero_grad() came first
    }
    if (exchange_) gathers.start(bucket, flat, *exchange_, /*background=*/false);
    if (bucket->whole_grads_hold_shard()) bucket->landed.shard.reset();
    whole.push_back(std::move(flat));
  }
  gathers.finish();

  size_t at = 0;
  for (const auto& bucket : buckets_) {
    for (Slot& slot : bucket->slots) {
      const uint8_t found = present[at++];
      if (found == kAbsent) continue;
      slot.param.mutable_grad() = shaped_like(whole[bucket->index], slot);
      slot.whole.mean.note(slot.param.grad());
      slot.whole.reached |= found == kReached;
    }
  }
}

// step() sends what no_sync() kept back on some rank, and what was put there by hand. What is the mean already on every
// rank is not sent again: it would be rounded once more.
void BucketManager::agree_on_unsent() {
  std::vector<uint8_t> unsent;
  for (const auto& bucket : buckets_) {
    for (const Slot& slot : bucket->slots) unsent.push_back(slot.whole.is_local(slot.param.grad()));
  }
  agreement_.take_largest(unsent);
  size_t at = 0;
  for (const auto& bucket : buckets_) {
    for (Slot& slot : bucket->slots) slot.whole.unsent = unsent[at++] != 0;
  }
  pass_.only_unsent = true;
}

void BucketManager::forget_reached() {
  for (const auto& bucket : buckets_) {
    for (Slot& slot : bucket->slots) slot.whole.reached = false;
  }
}

// This rank's shard of p.grad: pieces of the first slots as they lie, undefined without a gradient, and the rest
// packed.
std::vector<at::Tensor> BucketManager::pack_local(Bucket& bucket, int64_t num_straight) {
  const int64_t first = rank() * bucket.shard_numel;
  const int64_t packed_start = num_straight > 0 ? bucket.straight_numel(rank()) : 0;  // in the shard
  std::vector<at::Tensor> found;
  std::vector<at::Tensor> sources;
  std::vector<int64_t> pieces;
  // Pinned where an accelerator takes it, so that nothing waits for the copy.
  at::Tensor present = at::empty_like(
      bucket.landed.present, bucket.landed.present.options().device(at::kCPU).pinned_memory(bucket.flat.is_cuda()));
  auto* next_present = present.mutable_data_ptr<uint8_t>();
  for (const Slot& slot : bucket.slots) {
    const bool is_straight = num_straight-- > 0;
    const int64_t start = std::max(slot.offset, first);
    const int64_t stop = std::min(slot.offset + slot.numel(), first + bucket.shard_numel);
    if (!bucket.owns_part_of(slot, rank())) continue;
    const at::Tensor grad = slot.param.grad().defined() ? in_order_of(slot.param.grad(), slot.home.view) : at::Tensor();
    *next_present++ = grad.defined() ? 1 : 0;
    if (is_straight) {
      const auto here = [&] {
        return grad.as_strided({stop - start}, {1}, grad.storage_offset() + start - slot.offset);
      };
      found.push_back(grad.defined() ? here().to(bucket.grad_dtype) : grad);
      continue;
    }
    if (!grad.defined() || start >= stop) continue;
    pieces.insert(pieces.end(), {static_cast<int64_t>(sources.size()), start - slot.offset,
                                 start - first - packed_start, stop - start});
    sources.push_back(grad);
  }
  bucket.landed.present.copy_(present, /*non_blocking=*/true);
  const auto options = bucket.flat.options().dtype(bucket.grad_dtype);
  at::Tensor packed = at::empty({bucket.shard_numel - packed_start}, options);
  ops::flatten_(packed, sources, to_table(pieces, 4), to_table({}, 1));
  found.push_back(std::move(packed));
  return found;
}

// Where the wire is wider than p.grad, an element of the shard is kept while it still rounds to what p.grad holds:
// then both stages update from the same number.
at::Tensor BucketManager::take_local_shard(int64_t index) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  Bucket& bucket = *buckets_.at(index);
  at::Tensor packed = std::move(pack_local(bucket, 0).front());
  if (bucket.whole_grads_hold_shard()) return packed.to(bucket.wire_dtype);  // as the shard was, also on one rank
  if (bucket.landed.shard.defined()) {
    bucket.landed.shard = at::where(bucket.landed.shard.to(packed.scalar_type()) == packed, bucket.landed.shard,
                                    packed.to(bucket.wire_dtype));
  } else {
    bucket.landed.shard = packed.to(bucket.wire_dtype);
  }
  return bucket.landed.shard;
}

std::vector<at::Tensor> BucketManager::take_local_pieces(int64_t index) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  Bucket& bucket = *buckets_.at(index);
  if (bucket.num_straight == 0 || !bucket.flat.is_cpu()) return {};
  return pack_local(bucket, bucket.num_straight);
}

}  // namespace zx
