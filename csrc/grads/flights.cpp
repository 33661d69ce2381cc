#include "grads/flights.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/ParallelGuard.h>

#include <stdexcept>
#include <utility>

#include "check.h"
#include "grads/ops.h"
#include "locks.h"
#include "workers/ranges.h"

namespace zx {
namespace {

// See Note [Streams]: how many flights may have gradients that their producers have not waited for yet, and how many
// may have buffers.
constexpr size_t kUnpacked = 2;
constexpr size_t kWithBuffers = 2;

// One rank alone packs this much in less time than a thread takes to wake.
constexpr int64_t kSmallBytes = 256 * 1024;

// Workers run beside a backward that uses all the threads it was given, so each worker uses only its own thread.
struct WorkerScope {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::ParallelGuard single_thread{true};
};

// Runs `body`, and turns torch's errors into what users are told.
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

Flights::Flights(std::shared_ptr<Reduction> reduction, c10::Device device, bool waits_on_host)
    : reduction_(std::move(reduction)),
      workers_(
          device.is_cpu() || waits_on_host, [this](Flight& flight) { pack(flight); },
          [this](Flight& flight) { reduce(flight); }) {
  if (!device.is_cpu()) streams_.emplace(device);
}

void Flights::launch(std::shared_ptr<Flight> flight) {
  if (streams_) streams_->free_gradients(/*keep=*/kUnpacked);
  const Bucket& bucket = *flight->bucket;
  const int64_t numel = flight->adds ? bucket.own_slice_numel() : bucket.shards.packed_start(1);
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(bucket.wire_dtype));
  workers_.launch(std::move(flight), /*small=*/reduction_->is_local(bucket) && !streams_ && bytes <= kSmallBytes);
}

void Flights::after_reduction(std::function<void()> task) {
  if (streams_) {  // after what was reduced, and after what the caller's stream still does with it
    auto here = std::make_shared<c10::Event>(streams_->record(streams_->current()));
    task = [this, here, task = std::move(task)] {
      const c10::StreamGuard on(streams_->reduce());
      here->block(streams_->reduce());
      task();
    };
  }
  workers_.after_reduction(std::move(task));
}

void Flights::await_all() {
  process_.check();
  const std::string error = workers_.drain();
  if (streams_) streams_->await_all();
  TORCH_CHECK(error.empty(), error);
}

// Runs on the pack worker.
void Flights::pack(Flight& flight) {
  const WorkerScope scope;
  std::optional<c10::StreamGuard> on;
  if (streams_) {
    on.emplace(streams_->pack());
    for (const c10::Event& ready : flight.produced.ready) ready.block(streams_->pack());
    streams_->free_buffers(/*keep=*/workers_.has_threads() ? 0 : kWithBuffers - 1);
  }
  const auto work = [&] {
    if (workers_.failed()) return;
    const Bucket& bucket = *flight.bucket;
    const Range range("pack", bucket.index);
    const Doing doing([&bucket] { return "the exchange of the gradients of " + bucket.describe(); }, true);
    const auto options = bucket.flat.options().dtype(bucket.wire_dtype);
    flight.flat = at::empty({bucket.shards.packed_start(bucket.subgroup.world)}, options);
    ops::flatten_(flight.flat, flight.sources, flight.copies.pieces, flight.copies.flags);
    if (streams_ && workers_.has_threads()) {
      streams_->synchronize_pack();
      retain_sources(flight);
      streams_->free_gradients(/*keep=*/0);
    }
    if (!streams_) flight.sources.clear();
    if (auto pending = reduction_->send(flight)) workers_.set_pending(flight, std::move(pending));
  };
  workers_.attempt(flight, telling_reasons(work));
  if (streams_) {
    flight.packed.emplace(streams_->record(streams_->pack()));
    retain_sources(flight);
  }
}

void Flights::retain_sources(Flight& flight) {
  if (flight.sources.empty()) return;
  streams_->retain_gradients(std::exchange(flight.sources, {}), flight.produced.by, streams_->record(streams_->pack()));
}

// Runs on the reduce worker.
void Flights::reduce(Flight& flight) {
  const WorkerScope scope;
  std::optional<c10::StreamGuard> on;
  if (streams_) {
    on.emplace(streams_->reduce());
    flight.packed->block(streams_->reduce());
  }
  const int64_t index = flight.bucket->index;
  const Range range("land", index);
  const Doing doing([&flight] { return "the exchange of the gradients of " + flight.bucket->describe(); }, true);
  const auto work = [&] {
    if (flight.pending) {
      const Range range("wait", index);
      if (workers_.has_threads()) check_may_wait("other ranks' gradients");
      flight.pending->wait();
    }
    if (workers_.failed()) return;
    reduction_->reduce(flight);
    ++flight.bucket->reduced.version;
  };
  workers_.attempt(flight, telling_reasons(work));
  const auto let_go = [&] {
    if (!flight.pending) return;
    const Range range("let_go", index);
    flight.pending->let_go();  // even if something went wrong here: others should not wait for this rank
    if (!workers_.failed()) flight.pending->wait_for_readers();
  };
  workers_.attempt(flight, telling_reasons(let_go));
  if (streams_) {
    streams_->retain_buffers({std::move(flight.flat), std::move(flight.received), std::move(flight.inner_sums)},
                             streams_->record(streams_->reduce()));
  }
  if (workers_.failed()) {
    abandoned_.insert(abandoned_.end(), {flight.flat, flight.inner_sums});
    abandoned_.insert(abandoned_.end(), flight.zero_copy.begin(), flight.zero_copy.end());
  }
  flight.sources.clear();
  flight.zero_copy.clear();
  flight.flat.reset();
  flight.received.reset();
  flight.inner_sums.reset();
}

}  // namespace zx
