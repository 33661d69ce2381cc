#include "grads/whole_grads.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include "check.h"
#include "grads/local_grad.h"
#include "grads/ops.h"
#include "grads/packing.h"
#include "grads/zero_copy.h"
#include "params/gathers.h"
#include "workers/ranges.h"

namespace zx {
namespace {

at::Tensor shaped_like(const at::Tensor& flat, const Slot& slot) {
  return flat.as_strided(slot.home.view.sizes(), slot.home.view.strides(), flat.storage_offset() + slot.offset);
}

}  // namespace

Taken WholeGrads::take(const Bucket& /*bucket*/, Slot& /*slot*/, const at::Tensor& /*local*/, const Locked& /*lock*/) {
  TORCH_INTERNAL_ASSERT(false, "one rank alone sends no gradients");
}

void WholeGrads::scale(int64_t index, const at::Tensor& factor, const Slots& slots) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const Locked lock(buckets().mutex);
  Bucket& bucket = buckets().at(index);
  for (int64_t i = 0; i < static_cast<int64_t>(bucket.slots.size()); ++i) {
    Slot& slot = bucket.slots[i];
    const at::Tensor& grad = slot.param.grad();
    if (!grad.defined() || (slots && std::find(slots->begin(), slots->end(), i) == slots->end())) continue;
    values_of_grad(slot).mul_(factor);  // below version counters: it still is the mean
  }
  if (bucket.reduced.shard.defined() && !slots) {
    bucket.reduced.shard.mul_(factor);
  } else {
    bucket.reduced.shard.reset();  // see shard(): p.grad has the values
  }
}

GradsSeen WholeGrads::look(int64_t rounds, const Locked& /*lock*/) {
  GradsSeen seen{.with_grad = SlotSet(buckets().num_slots())};
  buckets().for_each_slot([&](Slot& slot, int64_t position) {
    const at::Tensor& grad = slot.param.grad();
    if (grad.defined()) {
      seen.with_grad.add(position);
      const bool is_known = slot.home.is_of_dtensor && slot.whole.mean.is(grad);
      if (seen.refusal.empty() && !is_known) seen.refusal = local_grad(slot).refusal;
      seen.unsent |= is_unsent(slot, rounds);
      seen.touched |= slot.whole.is_touched(grad);
    }
    seen.scaled |= slot.seen.scaled.is(grad);
  });
  return seen;
}

// This rank's shard of p.grad. The first slots are pieces where they lie, undefined if there is no gradient; the rest
// is packed.
std::vector<at::Tensor> WholeGrads::pack(Bucket& bucket, int64_t num_zero_copy) {
  const int64_t rank = bucket.subgroup.rank;
  const int64_t first = bucket.shards.start(rank);
  const int64_t packed_start = num_zero_copy > 0 ? bucket.shards.zero_copy_numel(rank) : 0;  // in the shard
  std::vector<at::Tensor> found;
  std::vector<at::Tensor> sources;
  std::vector<PieceRow> pieces;
  // Pinned for a CUDA device, so that nothing waits for the copy.
  at::Tensor present = at::empty_like(
      bucket.reduced.present, bucket.reduced.present.options().device(at::kCPU).pinned_memory(bucket.flat.is_cuda()));
  auto* next_present = present.mutable_data_ptr<uint8_t>();
  for (Slot& slot : bucket.slots) {
    const bool is_zero_copy = num_zero_copy-- > 0;
    const int64_t start = std::max(slot.offset, first);
    const int64_t stop = std::min(slot.offset + slot.numel(), bucket.shards.stop(rank));
    if (!bucket.owns_part_of(slot, rank)) continue;
    const at::Tensor local = slot.home.is_of_dtensor ? local_grad(slot).tensor : slot.param.grad();
    const at::Tensor grad = local.defined() ? in_order_of(local, slot.home) : at::Tensor();
    *next_present++ = grad.defined() ? 1 : 0;
    if (is_zero_copy) {
      const auto here = [&] {
        return grad.as_strided({stop - start}, {1}, grad.storage_offset() + start - slot.offset);
      };
      found.push_back(grad.defined() ? here().to(bucket.grad_dtype) : grad);
      continue;
    }
    if (!grad.defined() || start >= stop) continue;
    pieces.push_back(
        {static_cast<int64_t>(sources.size()), start - slot.offset, start - first - packed_start, stop - start});
    sources.push_back(grad);
  }
  bucket.reduced.present.copy_(present, /*non_blocking=*/true);
  const auto options = bucket.flat.options().dtype(bucket.grad_dtype);
  at::Tensor packed = at::empty({bucket.own_numel() - packed_start}, options);
  ops::flatten_(packed, sources, to_table(pieces), to_table({}, 1));
  found.push_back(std::move(packed));
  return found;
}

// If the wire is wider than p.grad, an element of the shard is kept while it still rounds to what p.grad holds. Then
// both stages update from the same number.
at::Tensor WholeGrads::shard(int64_t index) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  Bucket& bucket = buckets().at(index);
  at::Tensor packed = std::move(pack(bucket, 0).front());
  if (bucket.whole_grads_hold_shard()) return packed.to(bucket.wire_dtype);  // as the shard was, with one rank too
  if (bucket.reduced.shard.defined()) {
    bucket.reduced.shard = at::where(bucket.reduced.shard.to(packed.scalar_type()) == packed, bucket.reduced.shard,
                                     packed.to(bucket.wire_dtype));
  } else {
    bucket.reduced.shard = packed.to(bucket.wire_dtype);
  }
  return bucket.reduced.shard;
}

std::vector<at::Tensor> WholeGrads::shard_by_part(int64_t index) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  Bucket& bucket = buckets().at(index);
  if (bucket.num_zero_copy == 0 || !bucket.flat.is_cpu()) return {};
  return pack(bucket, bucket.num_zero_copy);
}

void GatheredGrads::before_accumulate(const Bucket& bucket, Slot& slot, const Locked& /*lock*/) {
  const at::Tensor& grad = slot.param.grad();
  WholeGrad& whole = slot.whole;
  if (!grad.defined() || whole.is_undone || whole.is_local(grad)) return;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  values_of_grad(slot).mul_(undoing(bucket));
  whole.is_undone = true;
}

void GatheredGrads::accumulated(Slot& slot, bool sync, const Locked& /*lock*/) {
  WholeGrad& whole = slot.whole;
  whole.unsent = !sync;
  if (whole.mean.is_any() && !whole.mean.is_after(++whole.num_added, slot.param.grad())) has_lost_mean_ = true;
}

Taken GatheredGrads::take(const Bucket& bucket, Slot& slot, const at::Tensor& local, const Locked& /*lock*/) {
  // p.grad includes the mean that was gathered before, so this flight replaces the shard.
  const at::Tensor& grad = slot.param.grad();
  WholeGrad& whole = slot.whole;
  const bool sent = grad.defined() && !rests_ && (whole.unsent || !only_unsent_);
  const bool is_mean = sent && !whole.is_undone && !whole.is_local(grad);
  slot.held = sent;
  whole.unsent = false;
  if (!sent) return {};
  at::Tensor source = in_order_of(local, slot.home);
  if (is_mean && undoing(bucket) != 1.0) source = source.mul(undoing(bucket));
  return {.source = std::move(source), .present = true, .replace = true};
}

// Gradients of a round that is not over yet have left, too.
bool GatheredGrads::is_unsent(const Slot& slot, int64_t rounds) const {
  return gathered_ == rounds && slot.whole.is_local(slot.param.grad());
}

// A rank that had no gradient of its own gets that of the others.
enum : uint8_t { kAbsent, kPresent, kReached };
std::vector<uint8_t> GatheredGrads::who_has_grads() {
  const Locked lock(buckets().mutex);
  std::vector<uint8_t> found;
  buckets().for_each_slot([&](Slot& slot, int64_t /*position*/) {
    found.push_back(!slot.held ? kAbsent : slot.fired.count > 0 ? kReached : kPresent);
    slot.fired.count = 0;  // for the next round, which may be another rank's
  });
  return found;
}

// Gathers the mean of each bucket into a buffer of its own.
std::vector<at::Tensor> GatheredGrads::gather_means(double scale) {
  std::vector<at::Tensor> whole;
  Gathers gathers({"the mean gradients", "gather_grads", "gather_grads_wait"});
  for (const auto& bucket : buckets().all) {
    const auto options = bucket->flat.options().dtype(bucket->grad_dtype);
    at::Tensor flat = at::empty({bucket->shards.numel()}, options);
    at::Tensor own = flat.narrow(0, bucket->shards.start(bucket->subgroup.rank), bucket->own_numel());
    put_together(*bucket);
    if (bucket->reduced.shard.defined()) {
      if (scale != 1.0 && undoing(*bucket) == 1.0) bucket->reduced.shard.mul_(scale);
      own.copy_(bucket->reduced.shard);
    } else {
      own.zero_();  // zero_grad() came first
    }
    gathers.start(bucket, flat, bucket->shards.starts(), *context_.exchanges->at(bucket->subgroup.exchange),
                  /*background=*/false);
    if (bucket->whole_grads_hold_shard()) bucket->reduced.shard.reset();
    whole.push_back(std::move(flat));
  }
  gathers.finish();
  return whole;
}

void GatheredGrads::complete(int64_t rounds, double scale, Agreement& agreement) {
  if (gathered_ == rounds) return;
  has_lost_mean_ = false;
  gathered_ = rounds;
  context_.flights->await_all();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const std::vector<uint8_t> present = told_in_subgroups(buckets(), who_has_grads(), 1, agreement);
  const std::vector<at::Tensor> whole = gather_means(scale);

  const Locked lock(buckets().mutex);
  size_t at = 0;
  for (const auto& bucket : buckets().all) {
    for (Slot& slot : bucket->slots) {
      const uint8_t found = present[at++];
      if (found == kAbsent) continue;
      const bool was_scaled = slot.seen.scaled.is(slot.param.grad());
      set_local_grad(slot, shaped_like(whole[bucket->index], slot));
      if (was_scaled) slot.seen.scaled.note(slot.param.grad());  // it is a part of the new mean
      slot.whole.mean.note(slot.param.grad());
      slot.whole.num_added = 0;
      slot.whole.reached |= found == kReached;
      slot.whole.is_undone = false;
    }
  }
}

// Sends what no_sync() kept back on some rank, and what was put there by hand. A gradient that is the mean already on
// every rank is not sent again: it would be rounded once more.
void GatheredGrads::send_rest(Agreement& agreement, const std::function<void()>& launch) {
  std::vector<uint8_t> unsent;
  {
    const Locked lock(buckets().mutex);
    buckets().for_each_slot(
        [&](Slot& slot, int64_t /*position*/) { unsent.push_back(slot.whole.is_local(slot.param.grad())); });
  }
  unsent = told_in_subgroups(buckets(), unsent, 1, agreement);
  {
    const Locked lock(buckets().mutex);
    buckets().for_each_slot([&](Slot& slot, int64_t position) { slot.whole.unsent = unsent[position] != 0; });
    only_unsent_ = true;
  }
  launch();
  const Locked lock(buckets().mutex);
  only_unsent_ = false;
}

void GatheredGrads::start_over(bool is_step) {
  const Locked lock(buckets().mutex);
  gathered_ = 0;
  if (!is_step) return;
  buckets().for_each_slot([](Slot& slot, int64_t /*position*/) {
    WholeGrad& whole = slot.whole;
    const at::Tensor& grad = slot.param.grad();
    whole.reached = false;
    // What step() reads is the mean, whatever all ranks did to it (a clip, say).
    if (!grad.defined() || whole.unsent || whole.mean.is_still(grad)) return;
    whole.mean.note(grad);
    whole.num_added = 0;
  });
}

}  // namespace zx
