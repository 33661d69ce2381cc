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

void PublishedState::end_change(StateChange what, bool is_whole, std::unique_ptr<Places> places) {
  const std::lock_guard lock(mutex_);
  if (places != nullptr) places_.swap(places);  // those before are destroyed without the lock
  is_broken_ |= !is_whole;
  strongest_ = std::max(strongest_, what);
  if (--depth_ > 0) return;
  if (strongest_ == StateChange::load && is_whole) is_broken_ = false;
  try {
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

void PublishedState::publish_addresses() {
  std::vector<int64_t> now;
  if (places_ != nullptr) now = places_->addresses();
  if (!directories_.empty() && directories_.back() == now) return;
  directories_.push_back(std::move(now));
  (*block_)[directory] = reinterpret_cast<int64_t>(directories_.back().data());
  (*block_)[length] = static_cast<int64_t>(directories_.back().size());
}

}  // namespace zx
