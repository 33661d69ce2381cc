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
      paced_(paced) {}

Backward::~Backward() {
  buckets_->for_each_slot([](Slot& slot, int64_t /*position*/) {
    remove_hooks(slot);
    at::Tensor& grad = slot.param.mutable_grad();
    if (grad.defined() && slot.placeholder.defined() && grad.is_same(slot.placeholder)) grad.reset();
  });
}

void Backward::add(const std::shared_ptr<Bucket>& bucket) {
  const Locked lock(buckets_->mutex);
  TORCH_CHECK(!pass_.open, "zerox: parameters can't be added inside a backward");
  buckets_->all.push_back(bucket);
  order_.add_bucket();
  for (Slot& slot : bucket->slots) install_hooks(*bucket, slot);
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
  // A rank without a backward of its own joins the others' rounds, and takes those that stay for the first ones.
  TORCH_CHECK(!stays || progress_.rounds.all == progress_.rounds.inner.count,
              "zerox: no_sync(outer=True) comes before the backwards that send everything, and there was one in this "
              "step");
  stays_inner_ = stays;
}

bool Backward::followed() const {
  const Locked lock(buckets_->mutex);
  return followed_;
}

void Backward::set_followed(bool followed) {
  const Locked lock(buckets_->mutex);
  followed_ = followed;
}

bool Backward::is_syncing() const {
  const Locked lock(buckets_->mutex);
  return sync_ && !stays_inner_;
}

void Backward::open_pass(const Locked& /*lock*/) {
  TORCH_CHECK(!pass_.open || !*pass_.raised,
              "zerox: the backward before this one raised an exception; call "
              "optimizer.zero_grad() before the next backward");
  if (pass_.open) return;
  refuse_other_reducers();
  pass_.open = true;
  pass_.first_task = pass_.last_task = pass_.whole_task = -1;
  pass_.again = pass_.is_static = false;
  pass_.paced = paced_ && !followed_;
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
  count_round(own);
  if (!own || !std::exchange(pass_.again, false)) return;
  for (const int64_t bucket : order_.order()) launch(bucket, empty, lock);
  count_round(own);
}

void Backward::count_round(bool own) {
  ++progress_.rounds.all;
  progress_.rounds.inner.count += stays_inner_ ? 1 : 0;
  progress_.rounds.inner.has_left = stays_inner_;
  progress_.rounds.own += own ? 1 : 0;
}

// Ends a pass whose end could not be seen, or never came because backward raised.
bool Backward::end_pass() {
  const Locked lock(buckets_->mutex);
  if (!pass_.open) return false;
  const bool raised = *pass_.raised;
  finish_pass(/*own=*/true, /*empty=*/raised, lock);
  if (raised) note_failure("its backward raised an exception", lock);
  return raised;
}

void Backward::launch_round(bool empty, bool stays_inner) {
  const Locked lock(buckets_->mutex);
  const bool before = std::exchange(stays_inner_, stays_inner);
  order_.begin(std::vector<int64_t>(buckets_->all.size(), 1));
  finish_pass(/*own=*/false, empty, lock);
  stays_inner_ = before;
}

// `empty`: after an exception in backward the bucket leaves without gradients, to keep ranks in step.
void Backward::launch(int64_t bucket, bool empty, const Locked& lock) {
  const Range range("launch", bucket);
  constexpr int64_t kOrderMix = 1000003;
  progress_.rounds.order = (progress_.rounds.order * kOrderMix + bucket + 1) % (kNoBackward / 4);
  std::string refusal;  // the round goes on without such a gradient, and the next sync() raises
  auto flight = packing_.make_flight(buckets_->all[bucket], empty, refusal, lock);
  flight->stays_inner = stays_inner_;
  const auto* flags = flight->copies.flags.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < flight->copies.flags.numel(); ++i) {
    if (flags[i] % 2 != 0) note_dropped((bucket << 40) + flags[i], lock);  // "replace" comes after "present"
  }
  flights_->launch(std::move(flight));
  if (!refusal.empty()) note_failure(refusal, lock);
}

Progress Backward::progress() const {
  const Locked lock(buckets_->mutex);
  return progress_;
}

void Backward::note_failure(const std::string& why, const Locked& /*lock*/) {
  if (progress_.failure.empty()) progress_.failure = why;
}

void Backward::fail(const std::string& why) {
  const Locked lock(buckets_->mutex);
  note_failure(why, lock);
}

bool Backward::has_failed() const {
  const Locked lock(buckets_->mutex);
  return !progress_.failure.empty() || (pass_.open && *pass_.raised);
}

void Backward::forget_failure() {
  const Locked lock(buckets_->mutex);
  progress_.failure.clear();
}

// What waits on other ranks' inner axis can't be told of what is discarded on this one only: see Note [Sums that wait].
void Backward::note_dropped(int64_t what, const Locked& /*lock*/) {
  if (!progress_.rounds.inner.has_left) return;
  constexpr uint64_t kMix = 0x9E3779B97F4A7C15U;
  const uint64_t mixed = (static_cast<uint64_t>(what) * kMix) ^ static_cast<uint64_t>(progress_.rounds.inner.count);
  progress_.rounds.inner.dropped =
      (progress_.rounds.inner.dropped + static_cast<int64_t>((mixed * kMix) >> 34U)) % (kNoBackward / 4);
}

void Backward::note_zeroed() {
  const Locked lock(buckets_->mutex);
  note_dropped(-1, lock);
  progress_.rounds.inner.has_left = false;
}

void Backward::start_over() {
  const Locked lock(buckets_->mutex);
  progress_.rounds.all = progress_.rounds.own = progress_.rounds.order = 0;
  progress_.rounds.has_kept = false;
  progress_.rounds.inner.count = progress_.rounds.inner.dropped = 0;
}

bool Backward::is_synced() const {
  const Locked lock(buckets_->mutex);
  return !pass_.open && progress_.rounds.all == 0;
}

bool Backward::has_order() const {
  const Locked lock(buckets_->mutex);
  return order_.is_set();
}

std::vector<int64_t> Backward::order() const {
  const Locked lock(buckets_->mutex);
  return order_.order();
}

std::vector<int64_t> Backward::learned_order() const {
  const Locked lock(buckets_->mutex);
  return order_.learned();
}

void Backward::set_order(std::vector<int64_t> order) {
  const Locked lock(buckets_->mutex);
  order_.set_order(std::move(order));
}

}  // namespace zx
