#include "grads/zero_copy.h"

#include <ATen/ops/zeros.h>

#include "math/norm.h"
#include "math/segment.h"

namespace zx {
namespace {

// The elements of a rank's slice that come from one zero-copy slot: [start, stop) of the slice, from `from` of the
// slot.
struct ZeroCopyRange {
  int64_t slot;
  int64_t from;
  int64_t start;
  int64_t stop;
};

std::vector<ZeroCopyRange> zero_copy_ranges(const Bucket& bucket, int64_t rank) {
  std::vector<ZeroCopyRange> found;
  const int64_t first = bucket.shards.start(rank);
  for (int64_t i = 0; i < bucket.num_zero_copy; ++i) {
    const Slot& slot = bucket.slots[i];
    const int64_t start = std::max(slot.offset, first);
    const int64_t stop = std::min(slot.offset + slot.numel(), bucket.shards.stop(rank));
    if (start < stop) found.push_back({i, start - slot.offset, start - first, stop - first});
  }
  return found;
}

// A rank's slice as the messages that it is sent in: some from the gradients, the last from the packed buffer.
Exchange::Messages messages_to(const Flight& flight, int64_t rank) {
  const Bucket& bucket = *flight.bucket;
  Exchange::Messages messages;
  for (const ZeroCopyRange& range : zero_copy_ranges(bucket, rank)) {
    messages.push_back(flight.zero_copy[range.slot].narrow(0, range.from, range.stop - range.start));
  }
  const int64_t start = bucket.shards.packed_start(rank);
  messages.push_back(flight.flat.narrow(0, start, bucket.shards.packed_start(rank + 1) - start));
  return messages;
}

// The same messages as they arrive in a whole slice.
Exchange::Messages messages_into(const Bucket& bucket, const at::Tensor& slice, int64_t rank) {
  Exchange::Messages messages;
  for (const ZeroCopyRange& range : zero_copy_ranges(bucket, rank)) {
    messages.push_back(slice.narrow(0, range.start, range.stop - range.start));
  }
  const int64_t start = bucket.shards.zero_copy_numel(rank);
  messages.push_back(slice.narrow(0, start, bucket.shards.slice_numel(rank) - start));
  return messages;
}

// The end of a part that would end at `end`, moved back so as not to cut a block that norms are taken over.
int64_t whole_blocks(const at::TensorAccessor<int64_t, 2>& rows, int64_t first_row, int64_t end) {
  for (int64_t row = first_row; row < rows.size(0) && rows[row][0] < end; ++row) {
    if (end < rows[row][1]) return end - (end - rows[row][0]) % kNormBlock;
  }
  return end;
}

// The rows [first, last) of the table as they lie in elements [start, stop) of the shard.
at::Tensor rows_inside(const at::Tensor& segments, int64_t first, int64_t last, int64_t start, int64_t stop) {
  at::Tensor rows = segments.narrow(0, first, last - first).clone();
  auto table = rows.accessor<int64_t, 2>();
  for (int64_t i = 0; i < rows.size(0); ++i) {
    auto* segment = reinterpret_cast<Segment*>(table[i].data());
    segment->param_start += std::max<int64_t>(start - segment->start, 0);
    segment->start = std::clamp(segment->start, start, stop) - start;
    segment->stop = std::clamp(segment->stop, start, stop) - start;
  }
  return rows;
}

}  // namespace

bool stay_in_place(const Bucket& bucket) { return bucket.flat.is_cpu() && !bucket.reduced.keeps_shard; }

void put_together(Bucket& bucket) {
  ReducedShard& reduced = bucket.reduced;
  if (reduced.by_part.empty()) return;
  reduced.shard = at::zeros({bucket.own_numel()}, reduced.by_part.back().options());
  for (size_t i = 0; i < reduced.by_part.size(); ++i) {
    const Part& part = bucket.own.parts[i];
    reduced.shard.narrow(0, part.start, part.numel).copy_(reduced.by_part[i]);
    reduced.by_part[i].reset();
  }
  reduced.by_part.clear();
}

std::vector<Part> parts_of(const Bucket& bucket, int64_t rank, int64_t most) {
  std::vector<Part> parts;
  const at::Tensor table = bucket.own.segments.cpu();  // the kernels' table lies where the shard is
  const auto rows = table.accessor<int64_t, 2>();
  int64_t first = 0;  // row that may have elements from here on
  const auto add = [&](size_t message, int64_t message_start, int64_t message_stop, int64_t last) {
    int64_t start = message_start;
    do {  // even an empty message gets a part, since its flags follow
      int64_t stop = message_stop;
      if (stop - start > most) stop = whole_blocks(rows, first, start + most);
      int64_t end = first;
      while (end < last && rows[end][0] < stop) ++end;
      if (stop == message_stop) end = last;
      parts.push_back({message, start - message_start, start, stop - start, first,
                       rows_inside(table, first, end, start, stop).to(bucket.own.segments.device())});
      while (first < end && rows[first][1] <= stop) ++first;
      start = stop;
    } while (start < message_stop);
  };
  size_t message = 0;
  for (const ZeroCopyRange& range : zero_copy_ranges(bucket, rank)) {
    add(message, range.start, range.stop, static_cast<int64_t>(message) + 1);
    ++message;
  }
  add(message, bucket.shards.zero_copy_numel(rank), bucket.shards.numel(rank), rows.size(0));
  return parts;
}

std::shared_ptr<Pending> send_zero_copy(Exchange& exchange, const Flight& flight) {
  std::vector<Exchange::Messages> sent;
  for (int peer = 0; peer < exchange.world(); ++peer) sent.push_back(messages_to(flight, peer));
  return exchange.send(sent, contributions(exchange, flight), flight.bucket->num_zero_copy + 1);
}

std::vector<Exchange::Messages> contributions(const Exchange& exchange, const Flight& flight) {
  std::vector<Exchange::Messages> all(exchange.world());
  int64_t place = 0;
  const int64_t slice_numel = flight.bucket->own_slice_numel();
  for (int peer = 0; peer < exchange.world(); ++peer) {
    if (peer == exchange.rank()) {
      all[peer] = messages_to(flight, peer);
    } else if (!exchange.reads(peer)) {
      const at::Tensor slice = flight.received.narrow(0, place++ * slice_numel, slice_numel);
      all[peer] = messages_into(*flight.bucket, slice, exchange.rank());
    }
  }
  return all;
}

}  // namespace zx
