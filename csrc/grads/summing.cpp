#include "grads/summing.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "grads/ops.h"
#include "grads/zero_copy.h"
#include "math/exact_sum.h"
#include "math/norm.h"
#include "workers/ranges.h"

namespace zx {
namespace {

// Data is read from all neighbours before it is added. It should be little enough to stay in a core's cache, with the
// gradient and the shard, but enough that a system call does not cost more than its bytes.
constexpr int64_t kReadBytes = 256 * 1024;
constexpr int64_t kLeastReadBytes = 32 * 1024;

}  // namespace

std::shared_ptr<Pending> Summing::send(Flight& flight) {
  flight.received = at::empty({exchange_->num_received() * flight.bucket->own_slice_numel()}, flight.flat.options());
  if (exchange_->sends_messages()) return send_zero_copy(*exchange_, flight);
  return exchange_->scatter(flight.flat, flight.received, flight.bucket->shards.packed_starts());
}

void Summing::reduce(Flight& flight) {
  Bucket& bucket = *flight.bucket;
  const Range range("reduce", bucket.index);
  const auto messages = messages_of(flight);
  read_flags(flight, messages);
  ReducedShard& reduced = bucket.reduced;
  const bool accumulate = std::exchange(reduced.has_gradient, true) && reduced.shard.defined();
  sum(flight, messages, accumulate);
}

int64_t Summing::most_in_a_part(const Bucket& bucket) const {
  const auto bytes = static_cast<int64_t>(c10::elementSize(bucket.wire_dtype));
  int64_t readable = 0;
  for (int rank = 0; rank < exchange_->world(); ++rank) readable += exchange_->reads(rank);
  if (readable == 0) return std::numeric_limits<int64_t>::max();
  return std::max(kReadBytes / readable, kLeastReadBytes) / bytes / kNormBlock * kNormBlock;
}

Summing::AllMessages Summing::messages_of(Flight& flight) const {
  if (exchange_->sends_messages()) return contributions(*exchange_, flight);
  AllMessages messages;
  const at::IntArrayRef starts = flight.bucket->shards.packed_starts();
  for (at::Tensor& slice : exchange_->to_sum(flight.flat, flight.received, starts)) {
    messages.push_back({std::move(slice)});
  }
  return messages;
}

void Summing::read_flags(const Flight& flight, const AllMessages& messages) {
  ReducedShard& reduced = flight.bucket->reduced;
  const Part& last = flight.bucket->own.parts.back();
  const int64_t flags_start = last.message_start + last.numel;
  ops::read_flags_(reduced.present, reduced.replaced,
                   slices(flight, messages, last.message, flags_start, flight.bucket->shards.trailer_numel()), 0);
}

void Summing::sum(const Flight& flight, const AllMessages& messages, bool accumulate) {
  const Bucket& bucket = *flight.bucket;
  ReducedShard& reduced = flight.bucket->reduced;
  if (!accumulate && !reduced.keeps_shard) reduced.shard = at::empty({bucket.own_numel()}, flight.flat.options());
  reduced.limbs = at::zeros({kExactLimbs}, flight.flat.options().dtype(at::kLong));
  int64_t end = 0;
  for (const Part& part : bucket.own.parts) {
    // Padding is zeroed: it is sent too, where shards are gathered.
    if (part.start > end) reduced.shard.narrow(0, end, part.start - end).zero_();
    end = part.start + part.numel;
    at::Tensor shard = bucket.own.parts.size() == 1 ? reduced.shard : reduced.shard.narrow(0, part.start, part.numel);
    ops::reduce_(shard, reduced.limbs, slices(flight, messages, part.message, part.message_start, part.numel),
                 part.segments, reduced.replaced.narrow(0, part.first_row, part.segments.size(0)),
                 bucket.reduced.divisor, accumulate);
  }
}

// The same elements of a message from each rank that is summed, in rank order. They are valid until the next call.
std::vector<at::Tensor> Summing::slices(const Flight& flight, const AllMessages& messages, size_t message,
                                        int64_t start, int64_t numel) {
  std::vector<at::Tensor> found;
  size_t place = 0;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    if (!messages[rank].empty()) {
      const at::Tensor& whole = messages[rank][message];
      found.push_back(start == 0 && numel == whole.numel() ? whole : whole.narrow(0, start, numel));
      continue;
    }
    if (place == scratch_.size()) scratch_.emplace_back();
    at::Tensor& kept = scratch_[place++];
    const int64_t bytes = numel * flight.flat.element_size();
    if (!kept.defined() || kept.numel() < bytes) kept = at::empty({bytes}, at::kByte);
    at::Tensor into = kept.narrow(0, 0, bytes).view(flight.flat.scalar_type());
    flight.pending->read(static_cast<int>(rank), message, start, into);
    found.push_back(std::move(into));
  }
  return found;
}

}  // namespace zx
