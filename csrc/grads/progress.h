// How far ranks' backwards are since the last step, and what went wrong in this one's.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "check.h"
#include "grads/agreement.h"

namespace zx {

// Under Buckets::mutex. What is told of it at a sync point: see LocalStatus.
class Progress {
 public:
  const Rounds& rounds() const { return rounds_; }

  // What leaves stays on the inner axis. Throws after a round that did not, in this step: a rank without a backward of
  // its own joins the others' rounds, and takes those that stay for the first ones.
  void set_stays_inner(bool stays) {
    TORCH_CHECK(!stays || rounds_.all == rounds_.inner.count,
                "zerox: no_sync(outer=True) comes before the backwards that send everything, and there was one in this "
                "step");
    stays_inner_ = stays;
  }
  // The same for one round, which another rank began. Returns what was set.
  bool exchange_stays_inner(bool stays) { return std::exchange(stays_inner_, stays); }
  bool stays_inner() const { return stays_inner_; }

  void note_launched(int64_t bucket) {
    constexpr int64_t kOrderMix = 1000003;
    rounds_.order = (rounds_.order * kOrderMix + bucket + 1) % (kNoBackward / 4);
  }
  // All buckets were launched. `own`: by a backward of this rank.
  void count_round(bool own) {
    ++rounds_.all;
    rounds_.inner.count += stays_inner_ ? 1 : 0;
    rounds_.inner.has_left = stays_inner_;
    rounds_.own += own ? 1 : 0;
  }
  void note_kept(bool kept) { rounds_.has_kept |= kept; }

  // What waits on other ranks' inner axis can't be told of what is discarded on this one only: see Note [Sums that
  // wait].
  void note_dropped(int64_t what) {
    if (!rounds_.inner.has_left) return;
    constexpr uint64_t kMix = 0x9E3779B97F4A7C15U;
    const uint64_t mixed = (static_cast<uint64_t>(what) * kMix) ^ static_cast<uint64_t>(rounds_.inner.count);
    rounds_.inner.dropped = (rounds_.inner.dropped + static_cast<int64_t>((mixed * kMix) >> 34U)) % (kNoBackward / 4);
  }

  // Only the first failure is kept.
  void fail(const std::string& why) {
    if (failure_.empty()) failure_ = why;
  }
  // Why zero_grad() must come before anything else; empty if nothing is wrong.
  const std::string& failure() const { return failure_; }

  // zero_grad() was called.
  void note_zeroed() {
    failure_.clear();
    note_dropped(-1);
    rounds_.inner.has_left = false;
  }
  // Rounds are counted anew.
  void start_over() {
    rounds_.all = rounds_.own = rounds_.order = 0;
    rounds_.has_kept = false;
    rounds_.inner.count = rounds_.inner.dropped = 0;
  }

 private:
  Rounds rounds_{};
  bool stays_inner_ = false;
  std::string failure_{};
};

}  // namespace zx
