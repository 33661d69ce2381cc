#include "grads/backward.h"

#include <algorithm>
#include <utility>

#include "check.h"
#include "workers/ranges.h"

namespace zx {

Backward::Backward(std::shared_ptr<Buckets> buckets, std::shared_ptr<MeanGrads> grads, std::shared_ptr<Flights> flights,
                   bool paced)
    : buckets_(std::move(buckets)),
      grads_(std::move(grads)),
      flights_(std::move(flights)),
      packing_(grads_, flights_),
      hooks_(buckets_, grads_),
      pace_(flights_, paced) {}

Backward::~Backward() {
  buckets_->for_each_slot([](Slot& slot, int64_t /*position*/) {
    GradHooks::remove(slot);
    at::Tensor& grad = slot.param.mutable_grad();
    if (grad.defined() && slot.placeholder.defined() && grad.is_same(slot.placeholder)) grad.reset();
  });
}

void Backward::add(const std::shared_ptr<Bucket>& bucket) {
  const Locked lock(buckets_->mutex);
  TORCH_CHECK(!pass_.open, "zerox: parameters can't be added inside a backward");
  buckets_->all.push_back(bucket);
  order_.add_bucket();
  hooks_.install(*bucket, weak_from_this());
}

void Backward::set_sync(bool sync) {
  const Locked lock(buckets_->mutex);
  sync_ = sync;
}

void Backward::set_decision(int64_t bucket, int64_t slot, std::shared_ptr<Decision> decision) {
  const Locked lock(buckets_->mutex);
  buckets_->at(bucket).slots.at(slot).hooks.decision = std::move(decision);
}

void Backward::set_stays_inner(bool stays) {
  const Locked lock(buckets_->mutex);
  progress_.set_stays_inner(stays);
}

bool Backward::followed() const {
  const Locked lock(buckets_->mutex);
  return pace_.followed();
}

void Backward::set_followed(bool followed) {
  const Locked lock(buckets_->mutex);
  pace_.set_followed(followed);
}

bool Backward::is_syncing() const {
  const Locked lock(buckets_->mutex);
  return sync_ && !progress_.stays_inner();
}

void Backward::open_pass(const Locked& /*lock*/) {
  TORCH_CHECK(!pass_.open || !*pass_.raised,
              "zerox: the backward before this one raised an exception; call "
              "optimizer.zero_grad() before the next backward");
  if (pass_.open) return;
  hooks_.refuse_other_reducers();
  pass_.open = true;
  pass_.first_task = pass_.last_task = pass_.whole_task = -1;
  pass_.again = pass_.is_static = false;
  pace_.begin_pass();
  pass_.raised = std::make_shared<bool>(false);
  std::vector<int64_t> pending;
  for (const auto& bucket : buckets_->all) {
    pending.push_back(0);
    for (Slot& slot : bucket->slots) {
      slot.fired.count = 0;
      pending.back() += slot.param.requires_grad() ? 1 : 0;
    }
  }
  order_.begin(std::move(pending));
}

// Launches the rest. See Note [Buckets launch in one order].
void Backward::finish_pass(bool own, bool empty, const Locked& lock) {
  for (const int64_t bucket : order_.finish()) launch(bucket, empty, lock);
  if (own && !empty && pass_.is_static) {
    buckets_->for_each_slot([](Slot& slot, int64_t /*position*/) {
      if (is_static(slot.hooks.decision)) slot.fired.awaited = std::max(slot.fired.awaited, slot.fired.count);
    });
  }
  pass_.end();
  progress_.count_round(own);
  if (!own || !std::exchange(pass_.again, false)) return;
  for (const int64_t bucket : order_.order()) launch(bucket, empty, lock);
  progress_.count_round(own);
}

// Ends a pass whose end could not be seen, or never came because backward raised.
bool Backward::end_pass() {
  const Locked lock(buckets_->mutex);
  if (!pass_.open) return false;
  const bool raised = *pass_.raised;
  finish_pass(/*own=*/true, /*empty=*/raised, lock);
  if (raised) progress_.fail("its backward raised an exception");
  return raised;
}

void Backward::launch_round(bool empty, bool stays_inner) {
  const Locked lock(buckets_->mutex);
  const bool before = progress_.exchange_stays_inner(stays_inner);
  order_.begin(std::vector<int64_t>(buckets_->all.size(), 1));
  finish_pass(/*own=*/false, empty, lock);
  progress_.exchange_stays_inner(before);
}

// `empty`: after an exception in backward the bucket leaves without gradients, to keep ranks in step.
void Backward::launch(int64_t bucket, bool empty, const Locked& lock) {
  const Range range("launch", bucket);
  progress_.note_launched(bucket);
  std::string refusal;  // the round goes on without such a gradient, and the next sync() raises
  auto flight = packing_.make_flight(buckets_->all[bucket], empty, refusal, lock);
  flight->stays_inner = progress_.stays_inner();
  const auto* flags = flight->copies.flags.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < flight->copies.flags.numel(); ++i) {
    if (flags[i] % 2 != 0) progress_.note_dropped((bucket << 40) + flags[i]);  // "replace" comes after "present"
  }
  flights_->launch(std::move(flight));
  if (!refusal.empty()) progress_.fail(refusal);
}

Progress Backward::progress() const {
  const Locked lock(buckets_->mutex);
  return progress_;
}

void Backward::fail(const std::string& why) {
  const Locked lock(buckets_->mutex);
  progress_.fail(why);
}

bool Backward::has_failed() const {
  const Locked lock(buckets_->mutex);
  return !progress_.failure().empty() || (pass_.open && *pass_.raised);
}

void Backward::note_zeroed() {
  const Locked lock(buckets_->mutex);
  progress_.note_zeroed();
}

void Backward::start_over() {
  const Locked lock(buckets_->mutex);
  progress_.start_over();
}

bool Backward::is_synced() const {
  const Locked lock(buckets_->mutex);
  return !pass_.open && progress_.rounds().all == 0;
}

bool Backward::has_order() const {
  const Locked lock(buckets_->mutex);
  return order_.is_set();
}

LaunchOrder Backward::order() const {
  const Locked lock(buckets_->mutex);
  return order_;
}

void Backward::set_order(std::vector<int64_t> order) {
  const Locked lock(buckets_->mutex);
  order_.set_order(std::move(order));
}

}  // namespace zx
