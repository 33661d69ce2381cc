#include "bucket_manager/flights.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/ParallelGuard.h>

#include "bucket_manager/ops.h"
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

}  // namespace

Flights::Flights(std::shared_ptr<Exchange> exchange, c10::Device device)
    : exchange_(std::move(exchange)), has_threads_(device.is_cpu() || (exchange_ && exchange_->waits_on_host())) {
  if (!device.is_cpu()) streams_.emplace(device);
}

Flights::~Flights() {
  const std::lock_guard lock(sky_.mutex);
  sky_.aborted = true;
  for (const auto& flight : sky_.airborne) {
    if (flight && flight->pending) flight->pending->abort();
  }
}

void Flights::post(Lane& lane, std::function<void()> task) {
  if (has_threads_) {
    lane.post(std::move(task));
  } else {
    task();
  }
}

void Flights::launch(std::shared_ptr<Flight> flight) {
  ++num_launched_;
  {
    const std::lock_guard lock(sky_.mutex);
    sky_.airborne.push_back(flight);
  }
  if (streams_) streams_->free_gradients(/*keep=*/kUnpacked);
  auto task = [this, flight = std::move(flight)] { pack(flight); };
  if (held_.on) {
    held_.tasks.emplace_back(std::move(task));
  } else {
    post(pack_lane_, std::move(task));
  }
}

void Flights::after_landing(std::function<void()> task) {
  start_held();
  if (streams_) {  // behind what landed, and behind what the caller's stream still does with it
    auto here = std::make_shared<c10::Event>(streams_->record(streams_->current()));
    task = [this, here, task = std::move(task)] {
      const c10::StreamGuard on(streams_->land());
      here->block(streams_->land());
      task();
    };
  }
  {
    std::unique_lock lock(sky_.mutex);
    if (sky_.airborne.empty()) {  // at once, so that memory is free when zero_grad() returns
      lock.unlock();
      task();
      return;
    }
    sky_.airborne.push_back(nullptr);  // the task has a place in line: a later one must not overtake it
  }
  post(pack_lane_, [this, task = std::move(task)] {
    post(land_lane_, [this, task] {
      task();
      const std::lock_guard lock(sky_.mutex);
      sky_.airborne.pop_front();
    });
  });
}

void Flights::start_held() {
  for (auto& task : held_.tasks) post(pack_lane_, std::move(task));
  held_.tasks.clear();
}

void Flights::land() {
  start_held();
  pack_lane_.drain();
  land_lane_.drain();
  if (streams_) streams_->join();
  const std::lock_guard lock(sky_.mutex);
  TORCH_CHECK(sky_.error.empty(), sky_.error);
}

std::string Flights::trouble() {
  const std::lock_guard lock(sky_.mutex);
  if (!sky_.error.empty()) return sky_.error;
  std::string text;
  for (const auto& flight : sky_.airborne) {
    if (flight) text += (text.empty() ? "still awaited: " : ", ") + flight->bucket->describe();
  }
  return text;
}

bool Flights::failed() {
  const std::lock_guard lock(sky_.mutex);
  return !sky_.error.empty() || sky_.aborted;
}

// On the pack lane.
void Flights::pack(const std::shared_ptr<Flight>& flight) {
  const LaneScope scope;
  buffers_.acquire();
  std::optional<c10::StreamGuard> on;
  if (streams_) {
    on.emplace(streams_->pack());
    for (const c10::Event& ready : flight->ready) ready.block(streams_->pack());
    streams_->free_buffers(/*keep=*/kWithBuffers - 1);
  }
  try {
    if (!failed()) {
      RECORD_FUNCTION("zerox::pack", std::vector<c10::IValue>());
      const Bucket& bucket = *flight->bucket;
      const int world = exchange_ ? exchange_->world() : 1;
      const auto options = bucket.slots.front().param.options().dtype(bucket.wire_dtype).requires_grad(false);
      flight->flat = at::empty({world * bucket.slice_numel()}, options);
      ops::flatten_(flight->flat, flight->sources, flight->pieces, flight->flags);
      if (!streams_) flight->sources.clear();
      if (exchange_) {
        flight->received = at::empty({exchange_->num_received() * bucket.slice_numel()}, options);
        auto pending = exchange_->scatter(flight->flat, flight->received);
        const std::lock_guard lock(sky_.mutex);
        flight->pending = std::move(pending);
        if (sky_.aborted) flight->pending->abort();
      }
    }
  } catch (...) {
    fail(flight);
  }
  if (streams_) {
    flight->packed.emplace(streams_->record(streams_->pack()));
    streams_->hold_gradients(std::move(flight->sources), std::move(flight->producers),
                             streams_->record(streams_->pack()));
  }
  on.reset();
  post(land_lane_, [this, flight] { arrive(flight); });
}

// On the land lane.
void Flights::arrive(const std::shared_ptr<Flight>& flight) {
  const LaneScope scope;
  std::optional<c10::StreamGuard> on;
  if (streams_) {
    on.emplace(streams_->land());
    flight->packed->block(streams_->land());
  }
  try {
    if (flight->pending) flight->pending->wait();
    if (!failed()) reduce(*flight->bucket, *flight);
  } catch (...) {
    fail(flight);
  }
  if (streams_) {
    streams_->hold_buffers({std::move(flight->flat), std::move(flight->received)}, streams_->record(streams_->land()));
  }
  flight->sources.clear();
  flight->flat.reset();
  flight->received.reset();
  {
    const std::lock_guard lock(sky_.mutex);
    flight->pending = nullptr;
    sky_.airborne.pop_front();
  }
  ++num_landed_;
  buffers_.release();
}

void Flights::reduce(Bucket& bucket, Flight& flight) {
  RECORD_FUNCTION("zerox::land", std::vector<c10::IValue>());
  Landed& landed = bucket.landed;
  std::vector<at::Tensor> slices{flight.flat};
  if (exchange_) slices = exchange_->to_sum(flight.flat, flight.received);
  ops::read_flags_(landed.present, landed.replaced, slices, bucket.shard_numel);
  const bool accumulate = bucket.accumulates && landed.holds;
  landed.holds = true;
  if (!exchange_ && !accumulate && !bucket.keeps_shard) {
    // Alone, the packed gradients are the mean. The norm is left to whoever asks for it.
    landed.shard = flight.flat.narrow(0, 0, bucket.shard_numel);
    landed.words.reset();
    return;
  }
  if (!accumulate && !bucket.keeps_shard) landed.shard = at::empty({bucket.shard_numel}, flight.flat.options());
  landed.words = at::zeros({kExactWords}, flight.flat.options().dtype(at::kLong));
  ops::reduce_(landed.shard, landed.words, slices, bucket.segments, landed.replaced, exchange_ ? exchange_->world() : 1,
               accumulate);
}

void Flights::fail(const std::shared_ptr<Flight>& flight) {
  const std::lock_guard lock(sky_.mutex);
  if (!sky_.error.empty() || sky_.aborted) return;
  std::string reason = "unknown error";
  try {
    throw;
  } catch (const std::exception& error) {
    reason = reason_of(error);
  } catch (...) {
  }
  sky_.error = "zerox: the gradients of " + flight->bucket->describe() + " did not arrive from all ranks: " + reason;
}

}  // namespace zx
