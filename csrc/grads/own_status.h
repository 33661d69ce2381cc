// What a rank knows of itself at a sync point, and what the last sync point told it of all.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "buckets/slot_set.h"
#include "grads/agreement.h"
#include "grads/sync_points.h"

namespace zx {

// Beside what its gradients say. Under Synchronizer::mutex_, but for what is atomic.
class OwnStatus {
 public:
  // How this rank follows the others. It does not wait for a thread that follows.
  void set_following(Following following) { following_ = following; }
  Following following() const { return following_; }

  void note_zeroed() { is_zeroed_ = true; }
  bool is_zeroed() const { return is_zeroed_; }
  bool take_zeroed() { return is_zeroed_.exchange(false); }

  void set_piggyback(std::vector<int64_t> piggyback) { piggyback_ = std::move(piggyback); }
  const std::vector<int64_t>& piggyback() const { return piggyback_; }

  // The next backward is the first one of a step.
  void begin_step() {
    had_gradient_ = false;
    is_new_ = true;
  }
  void note_gradient() { had_gradient_ = true; }
  void note_sent() { is_new_ = false; }

  // Of a rank that follows: whether its gradients of this step count all the same, whether it sends zeros, and whether
  // what p.grad holds is of an older step.
  bool counts() const { return had_gradient_ && !following().by_backward; }
  bool rests() const {
    const Following how = following_;
    return how.by_backward || (how.by_active && !had_gradient_);
  }
  bool is_behind() const { return is_new_ && !had_gradient_; }

 private:
  std::atomic<Following> following_ = Following{};
  std::atomic<bool> is_zeroed_ = false;  // zero() was called, and no rank told of it
  std::vector<int64_t> piggyback_;
  bool had_gradient_ = false;  // in this step
  bool is_new_ = false;        // no rank has sent anything since the last step
};

// What the last sync() saw, on any rank. Under Synchronizer::mutex_.
class LastStatus {
 public:
  void keep(const ReducedStatus& reduced) {
    holds_scaled_ = reduced[Said::scaled].most > 0;
    with_grad_ = reduced.with_grad;
    piggybacks_ = reduced.piggybacks;
  }

  bool holds_scaled() const { return holds_scaled_; }
  bool has_grad(int64_t slot) const { return with_grad_.has(slot); }
  const std::vector<int64_t>& piggybacks() const { return piggybacks_; }

 private:
  bool holds_scaled_ = false;
  SlotSet with_grad_{};
  std::vector<int64_t> piggybacks_{};
};

}  // namespace zx
