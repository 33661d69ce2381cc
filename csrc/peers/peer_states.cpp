#include "peers/peer_states.h"

#include <chrono>
#include <stdexcept>

#include "locks.h"
#include "peers/pause.h"

namespace zx {
namespace {

constexpr std::chrono::seconds kPatience{10};

}  // namespace

thread_local PeerStates::Pull* PeerStates::Pull::innermost_ = nullptr;

PeerStates::PeerStates(std::shared_ptr<PublishedState> own, std::shared_ptr<FailureDetector> failure_detector,
                       std::shared_ptr<Linger> linger, std::shared_ptr<StateSource> others)
    : own_(std::move(own)),
      failure_detector_(std::move(failure_detector)),
      linger_(std::move(linger)),
      reader_(std::in_place, linger_),
      others_(std::move(others)) {}

PeerStates::~PeerStates() {
  reader_.reset();
  Linger::keep(linger_, own_);
}

int PeerStates::num_pulls_here() const {
  int found = 0;
  for (const Pull* each = Pull::innermost_; each != nullptr; each = each->outer_)
    found += &each->states_ == this ? 1 : 0;
  return found;
}

// A handler of signals may synchronize in the middle of a pull: then this thread's own pulls find another stamp.
void PeerStates::await_pulls() {
  const int here = num_pulls_here();
  if (num_pulls_ <= here) return;
  check_may_wait("a thread that pulls state");
  Pause pause;
  while (num_pulls_ > here) {
    are_ended_ = pause.waited() > kPatience;
    pause();
  }
  are_ended_ = false;
}

std::optional<StateSource::Directory> PeerStates::look(int rank, int64_t version, LongWait& wait) const {
  if (rank != linger_->rank()) return others_->look(rank, version, wait);
  const StateStamp stamp = own_->now();
  if (stamp.version() < version || stamp.is_changing()) return std::nullopt;
  return Directory{stamp, own_->num_places()};
}

// The rank's, once it has come to this version or gone beyond. Nothing if another thread of this rank has gone on.
std::optional<StateSource::Directory> PeerStates::await(int rank, int64_t version, LongWait& wait) const {
  check_may_wait("a neighbour");
  if (own_->is_changed_by_this_thread()) {
    throw std::runtime_error("optimizer state is being changed by this thread, and can't be read meanwhile");
  }
  Pause pause;
  while (true) {
    if (auto found = look(rank, version, wait)) return found;
    if (own_->version() != version || are_ended_) return std::nullopt;
    if (linger_->has_ended(rank)) {
      if (auto found = look(rank, version, wait)) return found;
      throw std::runtime_error("it has ended before the step, or the load_state_dict(), of which this state is");
    }
    if (pause.waited() > failure_detector_->timeout()) {
      throw std::runtime_error("it has not come to the step, or to the load_state_dict(), of which this state is");
    }
    LongWait::check();
    pause();
  }
}

// All that is copied of one version has one directory.
std::optional<StateSource::Directory> PeerStates::find(int rank, int64_t version, LongWait& wait) {
  {
    const std::lock_guard lock(mutex_);
    const auto known = directories_.find(rank);
    if (known != directories_.end() && known->second.stamp.version() == version) return known->second;
  }
  auto found = await(rank, version, wait);
  if (!found || found->stamp.version() != version) return std::nullopt;
  if (found->stamp.is_broken()) {
    throw std::runtime_error(
        "an error, as of a load_state_dict(), has left its optimizer state as it was, or half changed: load a state "
        "on all ranks. Or optimizer.state was written there: call optimizer.synchronize() on all ranks");
  }
  const std::lock_guard lock(mutex_);
  directories_[rank] = *found;
  return found;
}

bool PeerStates::copy(int rank, const Directory& from, size_t place, size_t start, const at::Tensor& into,
                      LongWait& wait) const {
  if (rank != linger_->rank()) return others_->read(rank, from, place, start, into, wait);
  return own_->read(from.stamp, place, start, into.mutable_data_ptr(), into.nbytes(), /*follows_caller=*/true);
}

bool PeerStates::read(int rank, int64_t version, size_t num_places, size_t place, size_t start,
                      const at::Tensor& into) {
  return failure_detector_->reading(rank, [&](LongWait& wait) {
    const auto found = find(rank, version, wait);
    if (!found || own_->version() != version) return false;
    if (found->num_places == num_places && copy(rank, *found, place, start, into, wait)) return true;
    const std::lock_guard lock(mutex_);
    directories_.erase(rank);
    return false;
  });
}

}  // namespace zx
