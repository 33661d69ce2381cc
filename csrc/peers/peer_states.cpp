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
                       std::shared_ptr<Linger> linger, std::vector<int64_t> processes,
                       std::vector<uint64_t> control_blocks)
    : own_(std::move(own)),
      failure_detector_(std::move(failure_detector)),
      linger_(std::move(linger)),
      reader_(std::in_place, linger_),
      states_(std::move(processes), std::move(control_blocks)) {}

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

// The rank's stamp, once it has come to this version or gone beyond, and its state is not being changed. Nothing if
// another thread of this rank has gone on.
std::optional<StateStamp> PeerStates::await(int rank, int64_t version) const {
  check_may_wait("a neighbour");
  if (own_->is_changed_by_this_thread()) {
    throw std::runtime_error("optimizer state is being changed by this thread, and can't be read meanwhile");
  }
  Pause pause;
  while (true) {
    if (const auto stamp = states_.stamp_since(rank, version)) return stamp;
    if (own_->version() != version || are_ended_) return std::nullopt;
    if (linger_->has_ended(rank)) {
      if (const auto stamp = states_.stamp_since(rank, version)) return stamp;
      throw std::runtime_error("it has ended before the step, or the load_state_dict(), of which this state is");
    }
    if (pause.waited() > failure_detector_->timeout()) {
      throw std::runtime_error("it has not come to the step, or to the load_state_dict(), of which this state is");
    }
    LongWait::check();
    pause();
  }
}

std::optional<PeerStates::Directory> PeerStates::read_directory(int rank, int64_t version) const {
  return failure_detector_->reading(rank, [&]() -> std::optional<Directory> {
    const auto found = await(rank, version);
    if (!found || found->version() != version || own_->version() != version) return std::nullopt;
    if (found->is_broken()) {
      throw std::runtime_error(
          "an error, as of a load_state_dict(), has left its optimizer state as it was, or half changed: load a state "
          "on all ranks");
    }
    auto addresses = states_.addresses(rank, *found);
    if (!addresses) return std::nullopt;
    return Directory{found->word(), std::move(*addresses)};
  });
}

bool PeerStates::read(int rank, int64_t stamp, uint64_t address, const at::Tensor& into) const {
  return failure_detector_->reading(rank, [&] {
    const StateStamp wanted(stamp);
    return own_->version() == wanted.version() &&
           states_.read(rank, wanted, address, into.mutable_data_ptr(), into.nbytes());
  });
}

}  // namespace zx
