#include "bucket_manager/flights.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/ParallelGuard.h>

#include <limits>
#include <stdexcept>

#include "bucket_manager/ops.h"
#include "bucket_manager/ranges.h"
#include "bucket_manager/straight.h"
#include "check.h"
#include "math/exact_sum.h"
#include "math/norm.h"

namespace zx {
namespace {

// Flights whose gradients the producers have not waited for yet, and that have buffers: see Note [Streams].
constexpr size_t kUnpacked = 2;
constexpr size_t kWithBuffers = 2;

// What one rank alone packs in less time than a thread takes to wake.
constexpr int64_t kSmallBytes = 256 * 1024;

// What is read from all neighbours before it is added stays in a core's cache, with the gradient and the shard; but a
// system call should not cost more than its bytes.
constexpr int64_t kReadBytes = 256 * 1024;
constexpr int64_t kLeastReadBytes = 32 * 1024;

// Lanes run beside a backward that uses all the threads it was given: they use their own only.
struct LaneScope {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::ParallelGuard single_thread{true};
};

// Errors as they are told to users.
template <class Body>
auto telling_reasons(const Body& body) {
  return [&body] {
    try {
      body();
    } catch (const c10::Error& error) {
      throw std::runtime_error(reason_of(error));
    }
  };
}

}  // namespace

Flights::Flights(std::shared_ptr<Exchange> exchange, c10::Device device)
    : exchange_(std::move(exchange)),
      lanes_(
          device.is_cpu() || (exchange_ && exchange_->waits_on_host()), [this](Flight& flight) { pack(flight); },
          [this](Flight& flight) { land(flight); }) {
  if (!device.is_cpu()) streams_.emplace(device);
}

void Flights::launch(std::shared_ptr<Flight> flight) {
  if (streams_) streams_->free_gradients(/*keep=*/kUnpacked);
  const Bucket& bucket = *flight->bucket;
  const int64_t numel = flight->adds ? bucket.slice_numel() : bucket.packed_start(1);
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(bucket.wire_dtype));
  lanes_.launch(std::move(flight), /*small=*/!exchange_ && !streams_ && bytes <= kSmallBytes);
}

void Flights::after_landing(std::function<void()> task) {
  if (streams_) {  // behind what landed, and behind what the caller's stream still does with it
    auto here = std::make_shared<c10::Event>(streams_->record(streams_->current()));
    task = [this, here, task = std::move(task)] {
      const c10::StreamGuard on(streams_->land());
      here->block(streams_->land());
      task();
    };
  }
  lanes_.after_landing(std::move(task));
}

int64_t Flights::most_in_a_part(int64_t bytes) const {
  int64_t readable = 0;
  for (int rank = 0; exchange_ && rank < exchange_->world(); ++rank) readable += exchange_->reads(rank);
  if (readable == 0) return std::numeric_limits<int64_t>::max();
  return std::max(kReadBytes / readable, kLeastReadBytes) / bytes / kNormBlock * kNormBlock;
}

void Flights::land() {
  process_.check();
  const std::string error = lanes_.drain();
  if (streams_) streams_->join();
  TORCH_CHECK(error.empty(), error);
}

// On the pack lane.
void Flights::pack(Flight& flight) {
  const LaneScope scope;
  std::optional<c10::StreamGuard> on;
  if (streams_) {
    on.emplace(streams_->pack());
    for (const c10::Event& ready : flight.ready) ready.block(streams_->pack());
    streams_->free_buffers(/*keep=*/kWithBuffers - 1);
  }
  const auto work = [&] {
    if (lanes_.failed()) return;
    const Bucket& bucket = *flight.bucket;
    const Range range("pack", bucket.index);
    const int world = exchange_ ? exchange_->world() : 1;
    const auto options = bucket.slots.front().param.options().dtype(bucket.wire_dtype).requires_grad(false);
    flight.flat = at::empty({bucket.packed_start(world)}, options);
    ops::flatten_(flight.flat, flight.sources, flight.pieces, flight.flags);
    if (!streams_) flight.sources.clear();
    if (exchange_) {
      flight.received = at::empty({exchange_->num_received() * bucket.slice_numel()}, options);
      lanes_.set_pending(flight, exchange_->sends_messages() ? send_straight(*exchange_, flight)
                                                             : exchange_->scatter(flight.flat, flight.received));
    }
  };
  lanes_.attempt(flight, telling_reasons(work));
  if (streams_) {
    flight.packed.emplace(streams_->record(streams_->pack()));
    streams_->hold_gradients(std::move(flight.sources), std::move(flight.producers),
                             streams_->record(streams_->pack()));
  }
}

// On the land lane.
void Flights::land(Flight& flight) {
  const LaneScope scope;
  std::optional<c10::StreamGuard> on;
  if (streams_) {
    on.emplace(streams_->land());
    flight.packed->block(streams_->land());
  }
  const int64_t index = flight.bucket->index;
  const Range range("land", index);
  const auto work = [&] {
    if (flight.pending) {
      const Range range("wait", index);
      flight.pending->wait();
    }
    if (!lanes_.failed()) reduce(*flight.bucket, flight);
  };
  lanes_.attempt(flight, telling_reasons(work));
  const auto part = [&] {
    if (!flight.pending) return;
    const Range range("let_go", index);
    flight.pending->let_go();  // whatever went wrong here: others should not wait for this rank
    if (!lanes_.failed()) flight.pending->wait_for_readers();
  };
  lanes_.attempt(flight, telling_reasons(part));
  if (streams_) {
    streams_->hold_buffers({std::move(flight.flat), std::move(flight.received)}, streams_->record(streams_->land()));
  }
  if (lanes_.failed()) {
    abandoned_.push_back(flight.flat);
    abandoned_.insert(abandoned_.end(), flight.straight.begin(), flight.straight.end());
  }
  flight.sources.clear();
  flight.straight.clear();
  flight.flat.reset();
  flight.received.reset();
}

// Elements of a message from each rank that is summed, in rank order. Good until the next call.
std::vector<at::Tensor> Flights::slices(const Flight& flight, const std::vector<Exchange::Messages>& messages,
                                        size_t message, int64_t start, int64_t numel) {
  std::vector<at::Tensor> found;
  size_t place = 0;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    if (!messages[rank].empty()) {
      const at::Tensor& whole = messages[rank][message];
      found.push_back(start == 0 && numel == whole.numel() ? whole : whole.narrow(0, start, numel));
      continue;
    }
    if (place == scratch_.size()) scratch_.emplace_back();
    at::Tensor& room = scratch_[place++];
    const int64_t bytes = numel * flight.flat.element_size();
    if (!room.defined() || room.numel() < bytes) room = at::empty({bytes}, at::kByte);
    at::Tensor into = room.narrow(0, 0, bytes).view(flight.flat.scalar_type());
    flight.pending->read(static_cast<int>(rank), message, start, into);
    found.push_back(std::move(into));
  }
  return found;
}

void Flights::reduce(Bucket& bucket, Flight& flight) {
  const Range range("reduce", bucket.index);
  Landed& landed = bucket.landed;
  std::vector<Exchange::Messages> messages;
  if (!exchange_) {
    messages.push_back(own_messages(flight));
  } else if (exchange_->sends_messages()) {
    messages = contributions(*exchange_, flight);
  } else {
    for (at::Tensor& slice : exchange_->to_sum(flight.flat, flight.received)) messages.push_back({std::move(slice)});
  }
  const Part& last = bucket.parts.back();
  const int64_t flags_start = last.message_start + last.numel;
  ops::read_flags_(landed.present, landed.replaced,
                   slices(flight, messages, last.message, flags_start, bucket.trailer_numel), 0);
  if (!exchange_ && !flight.adds && !landed.keeps_shard) {  // model.zero_grad() leaves it to us
    landed.pieces.clear();
    landed.shard.reset();
  }
  if (landed.holds) join_pieces(bucket);
  const bool accumulate = landed.holds && landed.shard.defined();
  landed.holds = true;
  if (!exchange_ && !accumulate && !landed.keeps_shard) {
    // Alone, gradients are the mean. The norm is left to whoever asks for it.
    landed.words.reset();
    Exchange::Messages& own = messages.front();
    own.back() = own.back().narrow(0, 0, last.numel);  // less its flags
    if (bucket.num_straight == 0) {
      landed.shard = std::move(own.back());  // all was packed
    } else {
      landed.pieces = std::move(own);
    }
    return;
  }
  if (!accumulate && !landed.keeps_shard) landed.shard = at::empty({bucket.shard_numel}, flight.flat.options());
  landed.words = at::zeros({kExactWords}, flight.flat.options().dtype(at::kLong));
  int64_t end = 0;
  for (const Part& part : bucket.parts) {
    // Padding travels too, where shards are gathered.
    if (part.start > end) landed.shard.narrow(0, end, part.start - end).zero_();
    end = part.start + part.numel;
    at::Tensor shard = bucket.parts.size() == 1 ? landed.shard : landed.shard.narrow(0, part.start, part.numel);
    ops::reduce_(shard, landed.words, slices(flight, messages, part.message, part.message_start, part.numel),
                 part.segments, landed.replaced.narrow(0, part.first_row, part.segments.size(0)),
                 exchange_ ? exchange_->world() : 1, accumulate);
  }
}

}  // namespace zx
