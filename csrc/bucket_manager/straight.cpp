#include "bucket_manager/straight.h"

#include <ATen/ops/sub.h>
#include <ATen/ops/tensor.h>

namespace zx {
namespace {

// The elements of a rank's slice that come from one straight slot: [start, stop) of the slice, from `from` of the slot.
struct Range {
  int64_t slot;
  int64_t from;
  int64_t start;
  int64_t stop;
};

std::vector<Range> straight_ranges(const Bucket& bucket, int64_t rank) {
  std::vector<Range> found;
  const int64_t first = rank * bucket.shard_numel;
  for (int64_t i = 0; i < bucket.num_straight; ++i) {
    const Slot& slot = bucket.slots[i];
    const int64_t start = std::max(slot.offset, first);
    const int64_t stop = std::min(slot.offset + slot.numel(), first + bucket.shard_numel);
    if (start < stop) found.push_back({i, start - slot.offset, start - first, stop - first});
  }
  return found;
}

// A rank's slice as the messages that it is sent in: from the gradients, and from `packed`.
Exchange::Messages messages_to(const Flight& flight, int64_t rank) {
  const Bucket& bucket = *flight.bucket;
  Exchange::Messages messages;
  for (const Range& range : straight_ranges(bucket, rank)) {
    messages.push_back(flight.straight[range.slot].narrow(0, range.from, range.stop - range.start));
  }
  const int64_t start = bucket.packed_start(rank);
  messages.push_back(flight.flat.narrow(0, start, bucket.packed_start(rank + 1) - start));
  return messages;
}

// The same messages, where they arrive in a whole slice.
Exchange::Messages messages_into(const Bucket& bucket, const at::Tensor& slice, int64_t rank) {
  Exchange::Messages messages;
  for (const Range& range : straight_ranges(bucket, rank)) {
    messages.push_back(slice.narrow(0, range.start, range.stop - range.start));
  }
  const int64_t start = bucket.straight_numel(rank);
  messages.push_back(slice.narrow(0, start, bucket.slice_numel() - start));
  return messages;
}

// What each rank contributes to this one's slice, by rank, as messages.
std::vector<Exchange::Messages> contributions(const Exchange& exchange, const Flight& flight) {
  std::vector<Exchange::Messages> all;
  int64_t place = 0;
  const int64_t slice_numel = flight.bucket->slice_numel();
  for (int peer = 0; peer < exchange.world(); ++peer) {
    if (peer == exchange.rank()) {
      all.push_back(messages_to(flight, peer));
    } else {
      const at::Tensor slice = flight.received.narrow(0, place++ * slice_numel, slice_numel);
      all.push_back(messages_into(*flight.bucket, slice, exchange.rank()));
    }
  }
  return all;
}

}  // namespace

std::vector<Part> parts_of(const Bucket& bucket, int64_t rank) {
  std::vector<Part> parts;
  const auto add = [&](int64_t start, int64_t stop, int64_t first_row, int64_t num_rows) {
    at::Tensor segments = bucket.segments.narrow(0, first_row, num_rows);
    if (start > 0) {  // the columns `start` and `stop` come first
      segments = segments - at::tensor({start, start, int64_t{0}, int64_t{0}, int64_t{0}}, segments.options());
    }
    parts.push_back({start, stop - start, first_row, std::move(segments)});
  };
  int64_t row = 0;
  for (const Range& range : straight_ranges(bucket, rank)) add(range.start, range.stop, row++, 1);
  add(bucket.straight_numel(rank), bucket.shard_numel, row, bucket.segments.size(0) - row);
  return parts;
}

std::shared_ptr<Pending> send_straight(Exchange& exchange, const Flight& flight) {
  std::vector<Exchange::Messages> sent;
  for (int peer = 0; peer < exchange.world(); ++peer) sent.push_back(messages_to(flight, peer));
  return exchange.send(sent, contributions(exchange, flight), flight.bucket->num_straight + 1);
}

std::vector<std::vector<at::Tensor>> parts_to_sum(const Exchange& exchange, const Flight& flight) {
  std::vector<std::vector<at::Tensor>> parts(flight.bucket->parts.size());
  for (const Exchange::Messages& messages : contributions(exchange, flight)) {
    for (size_t i = 0; i < parts.size(); ++i) parts[i].push_back(messages[i]);
  }
  return parts;
}

}  // namespace zx
