#include "bucket_manager/flights.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/ParallelGuard.h>

#include <stdexcept>

#include "bucket_manager/ops.h"
#include "bucket_manager/straight.h"
#include "check.h"
#include "math/exact_sum.h"

namespace zx {
namespace {

// Flights whose gradients the producers have not waited for yet, and that have buffers: see Note [Streams].
constexpr size_t kUnpacked = 2;
constexpr size_t kWithBuffers = 2;

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
  lanes_.launch(std::move(flight));
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

void Flights::land() {
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
    RECORD_FUNCTION("zerox::pack", std::vector<c10::IValue>());
    const Bucket& bucket = *flight.bucket;
    const int world = exchange_ ? exchange_->world() : 1;
    const auto options = bucket.slots.front().param.options().dtype(bucket.wire_dtype).requires_grad(false);
    flight.flat = at::empty({bucket.packed_start(world)}, options);
    ops::flatten_(flight.flat, flight.sources, flight.pieces, flight.flags);
    if (!streams_) flight.sources.clear();
    if (exchange_) {
      flight.received = at::empty({exchange_->num_received() * bucket.slice_numel()}, options);
      lanes_.set_pending(flight, bucket.num_straight > 0 ? send_straight(*exchange_, flight)
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
  const auto work = [&] {
    if (flight.pending) flight.pending->wait();
    if (!lanes_.failed()) reduce(*flight.bucket, flight);
  };
  lanes_.attempt(flight, telling_reasons(work));
  if (streams_) {
    streams_->hold_buffers({std::move(flight.flat), std::move(flight.received)}, streams_->record(streams_->land()));
  }
  flight.sources.clear();
  flight.straight.clear();
  flight.flat.reset();
  flight.received.reset();
}

void Flights::reduce(Bucket& bucket, Flight& flight) {
  RECORD_FUNCTION("zerox::land", std::vector<c10::IValue>());
  Landed& landed = bucket.landed;
  std::vector<std::vector<at::Tensor>> slices{{flight.flat}};  // of each part
  if (bucket.num_straight > 0) {
    slices = parts_to_sum(*exchange_, flight);
  } else if (exchange_) {
    slices = {exchange_->to_sum(flight.flat, flight.received)};
  }
  ops::read_flags_(landed.present, landed.replaced, slices.back(), bucket.parts.back().numel);
  const bool accumulate = landed.holds && landed.shard.defined();
  landed.holds = true;
  if (!exchange_ && !accumulate && !bucket.keeps_shard) {
    // Alone, the packed gradients are the mean. The norm is left to whoever asks for it.
    landed.shard = flight.flat.narrow(0, 0, bucket.shard_numel);
    landed.words.reset();
    return;
  }
  if (!accumulate && !bucket.keeps_shard) landed.shard = at::empty({bucket.shard_numel}, flight.flat.options());
  landed.words = at::zeros({kExactWords}, flight.flat.options().dtype(at::kLong));
  int64_t end = 0;
  for (size_t i = 0; i < bucket.parts.size(); ++i) {
    const Part& part = bucket.parts[i];
    // Padding travels too, where shards are gathered.
    if (part.start > end) landed.shard.narrow(0, end, part.start - end).zero_();
    end = part.start + part.numel;
    at::Tensor shard = bucket.parts.size() == 1 ? landed.shard : landed.shard.narrow(0, part.start, part.numel);
    ops::reduce_(shard, landed.words, slices[i], part.segments,
                 landed.replaced.narrow(0, part.first_row, part.segments.size(0)), exchange_ ? exchange_->world() : 1,
                 accumulate);
  }
}

}  // namespace zx
