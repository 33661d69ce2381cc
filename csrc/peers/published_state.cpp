#include "peers/published_state.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <utility>

namespace zx {

PublishedState::~PublishedState() {
  (*block_)[stamp] = StateStamp::gone().word();
  ControlBlock::keep_for_others(std::move(block_));
}

void PublishedState::set_stamp(bool is_changing) {
  (*block_)[stamp] = StateStamp(version_, num_changes_, is_changing, is_broken_).word();
}

void PublishedState::begin_change() {
  const std::lock_guard lock(mutex_);
  if (depth_++ > 0) return;
  strongest_ = StateChange::of_this_rank;
  changing_ = std::this_thread::get_id();
  set_stamp(/*is_changing=*/true);
}

void PublishedState::end_change(StateChange what, bool is_whole, std::shared_ptr<Places> places) {
  const std::lock_guard lock(mutex_);
  if (places != nullptr) places_.swap(places);  // those before are destroyed without the lock
  is_broken_ |= !is_whole;
  strongest_ = std::max(strongest_, what);
  if (--depth_ > 0) return;
  if (strongest_ == StateChange::load && is_whole) is_broken_ = false;
  try {
    if (places_ != nullptr) places_->note_change();
    publish_addresses();
  } catch (const std::exception&) {  // there is no memory for it
    is_broken_ = true;
  }
  ++num_changes_;
  if (strongest_ == StateChange::step) {
    version_ = (version_ / StateStamp::kRound + 1) * StateStamp::kRound;
  } else if (strongest_ != StateChange::of_this_rank) {
    ++version_;
  }
  set_stamp(/*is_changing=*/false);
  changing_ = std::thread::id();
}

void PublishedState::follow_change() const {
  const std::lock_guard lock(mutex_);
  if (places_ != nullptr) places_->follow_change();
}

size_t PublishedState::num_places() const {
  const std::lock_guard lock(mutex_);
  return places_ == nullptr ? 0 : places_->count();
}

// Whoever reads keeps the places, which another thread may replace meanwhile.
bool PublishedState::read(StateStamp wanted, size_t place, size_t start, void* into, size_t bytes,
                          bool follows_caller) const {
  std::shared_ptr<const Places> places;
  {
    const std::lock_guard lock(mutex_);
    if (now() != wanted || places_ == nullptr) return false;
    places = places_;
  }
  fence_of_copies();
  try {
    places->read(place, start, into, bytes, follows_caller);
  } catch (const std::exception&) {
    if (now() == wanted) throw;
    return false;
  }
  fence_of_copies();
  return now() == wanted;
}

void PublishedState::publish_addresses() {
  std::vector<int64_t> now;
  if (places_ != nullptr) now = places_->addresses();
  if (!directories_.empty() && directories_.back() == now) return;
  directories_.push_back(std::move(now));
  (*block_)[directory] = reinterpret_cast<int64_t>(directories_.back().data());
  (*block_)[length] = static_cast<int64_t>(directories_.back().size());
}

}  // namespace zx
