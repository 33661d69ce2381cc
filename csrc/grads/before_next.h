// What is to be done once, before the next gradient is accumulated, here or, where this rank follows, on other ranks.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>

#include "locks.h"

namespace zx {

class BeforeNext {
 public:
  void set(std::function<void()> call) {
    const std::lock_guard lock(mutex_);
    call_ = std::move(call);
    is_set_ = call_ != nullptr;
  }

  // On any of autograd's threads. The others wait too: what they accumulate comes after it.
  void call() {
    if (!is_set_) return;
    const std::lock_guard lock(mutex_);
    if (!is_set_) return;
    call_();
    is_set_ = false;
  }

 private:
  std::atomic<bool> is_set_ = false;
  Mutex<LockRank::before_next> mutex_;
  std::function<void()> call_;
};

}  // namespace zx
