// Where all ranks were together last, as one of them knows it.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "locks.h"

namespace zx {

// Any thread may call any of these, which take a moment.
class LastSeen {
 public:
  void passed(const std::string& sync_point) {
    const std::lock_guard lock(mutex_);
    met_ = sync_point;
    in_step_ = step_;
  }
  void step_begun() {
    const std::lock_guard lock(mutex_);
    ++step_;
  }

  // False until the optimizer is made.
  bool is_anywhere() const {
    const std::lock_guard lock(mutex_);
    return !met_.empty();
  }
  std::string text() const {
    const std::lock_guard lock(mutex_);
    return "seen in " + (met_.empty() ? "the optimizer's constructor" : met_ + " of step " + std::to_string(in_step_));
  }

 private:
  mutable Mutex<LockRank::last_seen> mutex_;  // of all below
  std::string met_;
  int64_t in_step_ = 0;
  int64_t step_ = 1;
};

}  // namespace zx
