#include "bucket_manager/flights.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/util/ParallelGuard.h>

#include "bucket_manager/ops.h"
#include "math/exact_sum.h"

namespace zx {
namespace {

// Lanes run beside a backward that uses all the threads it was given: they use their own only.
struct LaneScope {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::ParallelGuard single_thread{true};
};

}  // namespace

Flights::Flights(std::shared_ptr<Exchange> exchange) : exchange_(std::move(exchange)) {}

Flights::~Flights() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  for (const auto& flight : airborne_) {
    if (flight && flight->pending) flight->pending->abort();
  }
}

void Flights::launch(std::shared_ptr<Flight> flight) {
  ++num_launched_;
  {
    const std::lock_guard lock(mutex_);
    airborne_.push_back(flight);
  }
  auto task = [this, flight = std::move(flight)] { pack(flight); };
  if (hold_) {
    held_.emplace_back(std::move(task));
  } else {
    pack_lane_.post(std::move(task));
  }
}

void Flights::after_landing(std::function<void()> task) {
  start_held();
  {
    std::unique_lock lock(mutex_);
    if (airborne_.empty()) {  // at once, so that memory is free when zero_grad() returns
      lock.unlock();
      task();
      return;
    }
    airborne_.push_back(nullptr);  // the task has a place in line: a later one must not overtake it
  }
  pack_lane_.post([this, task = std::move(task)] {
    land_lane_.post([this, task] {
      task();
      const std::lock_guard lock(mutex_);
      airborne_.pop_front();
    });
  });
}

void Flights::start_held() {
  for (auto& task : held_) pack_lane_.post(std::move(task));
  held_.clear();
}

void Flights::land() {
  start_held();
  pack_lane_.drain();
  land_lane_.drain();
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(error_.empty(), error_);
}

std::string Flights::trouble() {
  const std::lock_guard lock(mutex_);
  if (!error_.empty()) return error_;
  std::string text;
  for (const auto& flight : airborne_) {
    if (flight) text += (text.empty() ? "still awaited: " : ", ") + flight->bucket->describe();
  }
  return text;
}

bool Flights::failed() {
  const std::lock_guard lock(mutex_);
  return !error_.empty() || aborted_;
}

// On the pack lane.
void Flights::pack(const std::shared_ptr<Flight>& flight) {
  const LaneScope scope;
  buffers_.acquire();
  try {
    if (!failed()) {
      RECORD_FUNCTION("zerox::pack", std::vector<c10::IValue>());
      const Bucket& bucket = *flight->bucket;
      const int world = exchange_ ? exchange_->world() : 1;
      const auto options = bucket.slots.front().param.options().dtype(bucket.wire_dtype).requires_grad(false);
      flight->flat = at::empty({world * bucket.slice_numel()}, options);
      ops::flatten_(flight->flat, flight->sources, flight->pieces, flight->flags);
      flight->sources.clear();
      if (exchange_) {
        flight->received = at::empty({exchange_->num_received() * bucket.slice_numel()}, options);
        auto pending = exchange_->scatter(flight->flat, flight->received);
        const std::lock_guard lock(mutex_);
        flight->pending = std::move(pending);
        if (aborted_) flight->pending->abort();
      }
    }
  } catch (...) {
    fail(flight);
  }
  land_lane_.post([this, flight] { arrive(flight); });
}

// On the land lane.
void Flights::arrive(const std::shared_ptr<Flight>& flight) {
  const LaneScope scope;
  try {
    if (flight->pending) flight->pending->wait();
    if (!failed()) {
      RECORD_FUNCTION("zerox::land", std::vector<c10::IValue>());
      Bucket& bucket = *flight->bucket;
      std::vector<at::Tensor> slices{flight->flat};
      if (exchange_) slices = exchange_->to_sum(flight->flat, flight->received);
      ops::read_flags_(bucket.present, bucket.replaced, slices, bucket.shard_numel);
      const bool accumulate = bucket.accumulates && bucket.shard.defined();
      if (!exchange_ && !accumulate) {
        // Alone, the packed gradients are the mean. The norm is left to whoever asks for it.
        bucket.shard = flight->flat.narrow(0, 0, bucket.shard_numel);
        bucket.words.reset();
      } else {
        if (!accumulate) bucket.shard = at::empty({bucket.shard_numel}, flight->flat.options());
        bucket.words = at::zeros({kExactWords}, flight->flat.options().dtype(at::kLong));
        ops::reduce_(bucket.shard, bucket.words, slices, bucket.segments, bucket.replaced,
                     exchange_ ? exchange_->world() : 1, accumulate);
      }
    }
  } catch (...) {
    fail(flight);
  }
  flight->sources.clear();
  flight->flat.reset();
  flight->received.reset();
  {
    const std::lock_guard lock(mutex_);
    flight->pending = nullptr;
    airborne_.pop_front();
  }
  ++num_landed_;
  buffers_.release();
}

void Flights::fail(const std::shared_ptr<Flight>& flight) {
  const std::lock_guard lock(mutex_);
  if (!error_.empty() || aborted_) return;
  std::string reason = "unknown error";
  try {
    throw;
  } catch (const std::exception& error) {
    reason = error.what();
  } catch (...) {
  }
  error_ = "zerox: the gradients of " + flight->bucket->describe() + " did not arrive from all ranks: " + reason;
}

}  // namespace zx
