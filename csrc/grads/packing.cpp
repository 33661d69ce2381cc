#include "grads/packing.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "exchange/collectives.h"
#include "grads/local_grad.h"
#include "grads/mean_grads.h"

namespace zx {

at::Tensor to_table(const std::vector<int64_t>& numbers, int64_t columns) {
  const auto count = static_cast<int64_t>(numbers.size());
  at::Tensor table = at::empty({count}, at::kLong);
  std::copy(numbers.begin(), numbers.end(), table.mutable_data_ptr<int64_t>());
  return columns > 1 ? table.view({count / columns, columns}) : table;
}

at::Tensor to_table(const std::vector<PieceRow>& rows) {
  std::vector<int64_t> numbers;
  for (const PieceRow& row : rows) numbers.insert(numbers.end(), row.begin(), row.end());
  return to_table(numbers, static_cast<int64_t>(PieceRow().size()));
}

at::Tensor in_order_of(const at::Tensor& grad, const Home& home) {
  const at::Tensor plain = grad.requires_grad() ? grad.detach() : grad;
  return home.has_order_of(plain) ? plain : at::empty_like(home.view, plain.options()).copy_(plain);
}

namespace {

// The source in one dense dimension; zeros if there is no source.
at::Tensor in_memory_order(const at::Tensor& source, const Slot& slot, at::ScalarType dtype) {
  if (!source.defined()) return at::zeros({slot.numel()}, slot.home.view.options().dtype(dtype));
  return source.as_strided({slot.numel()}, {1}, source.storage_offset()).to(dtype);
}

}  // namespace

// See Note [Who holds a gradient].
Taken Packing::take(const Bucket& bucket, Slot& slot, bool empty, std::string& refusal, const Locked& lock) const {
  if (empty) return {.replace = true};
  LocalGrad grad = local_grad(slot);
  if (!grad.refusal.empty()) {
    refusal = std::move(grad.refusal);
    return {};
  }
  return grads_->take(bucket, slot, grad.tensor, lock);
}

void Packing::note_producer(Bucket& bucket, const Locked& /*lock*/) const {
  const Streams* streams = flights_->streams();
  if (streams == nullptr) return;
  const c10::Stream current = streams->current();
  auto& known = bucket.producers;
  if (std::find(known.begin(), known.end(), current) == known.end()) known.push_back(current);
}

std::shared_ptr<Flight> Packing::make_flight(const std::shared_ptr<Bucket>& bucket, bool empty, std::string& refusal,
                                             const Locked& lock) const {
  auto flight = std::make_shared<Flight>();
  flight->bucket = bucket;
  const Shards& shards = bucket->shards;
  std::vector<PieceRow> pieces;
  std::vector<int64_t> flags;
  std::vector<int64_t> segments_before(bucket->subgroup.world,
                                       0);  // flags go after each shard, in the order of its segments
  for (Slot& slot : bucket->slots) {
    const bool stood = slot.held;
    Taken taken = take(*bucket, slot, empty, refusal, lock);
    // A worker lets go of it, perhaps while the interpreter ends: see Note [Tensors that Python does not know].
    if (taken.source.defined()) taken.source = unknown_to_python(taken.source);
    flight->adds |= stood && !taken.replace;
    const bool is_zero_copy = static_cast<int64_t>(flight->zero_copy.size()) < bucket->num_zero_copy;
    if (is_zero_copy) flight->zero_copy.push_back(in_memory_order(taken.source, slot, bucket->wire_dtype));
    for (int64_t rank = shards.rank_of(slot.offset); rank < bucket->subgroup.world && bucket->owns_part_of(slot, rank);
         ++rank) {
      // Where the slice would start in `flat`, if its zero-copy part were there too.
      const int64_t packed = shards.packed_start(rank) - shards.zero_copy_numel(rank);
      const int64_t flag = packed + shards.numel(rank) + 2 * segments_before[rank]++;
      if (taken.present) flags.push_back(flag);
      if (taken.replace) flags.push_back(flag + 1);
      if (!taken.source.defined() || slot.numel() == 0 || is_zero_copy) continue;
      const int64_t start = std::max(slot.offset, shards.start(rank));
      const int64_t stop = std::min(slot.offset + slot.numel(), shards.stop(rank));
      pieces.push_back({static_cast<int64_t>(flight->sources.size()), start - slot.offset,
                        packed + start - shards.start(rank), stop - start});
    }
    if (taken.source.defined() && !is_zero_copy) flight->sources.push_back(std::move(taken.source));
  }
  // In the order of `flat`, as kernels read them. Slots lie in it too, unless they have owners.
  const auto by_place = [](const PieceRow& a, const PieceRow& b) { return a[2] < b[2]; };
  if (!std::is_sorted(pieces.begin(), pieces.end(), by_place)) std::sort(pieces.begin(), pieces.end(), by_place);
  if (!std::is_sorted(flags.begin(), flags.end())) std::sort(flags.begin(), flags.end());
  flight->copies.pieces = to_table(pieces);
  flight->copies.flags = to_table(flags, 1);
  if (const Streams* streams = flights_->streams()) {
    note_producer(*bucket, lock);  // for gradients that were written by hand, or brought into order above
    flight->produced.by.swap(bucket->producers);
    flight->produced.ready = streams->record(flight->produced.by);
  }
  return flight;
}

}  // namespace zx
