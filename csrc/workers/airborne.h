// Which flights are in the air, in the order in which they were launched, and the first error.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "locks.h"

namespace zx {

// How a wait ended: few are in the air; or it was in vain, since another rank waits for this one, or for too long.
enum class WaitEnd : uint8_t { few, in_vain, too_long };

// How long to wait while nothing is reduced: `least` in any case, and up to `most` unless `ends` says that it is in
// vain.
struct Patience {
  std::chrono::milliseconds least;
  std::chrono::milliseconds most = least;
  std::function<bool()> ends = [] { return false; };
};

// Of a `Flight` as TwoWorkers has it. Any thread may call any of these.
template <class Flight>
class Airborne {
 public:
  // The flight is launched. Returns whether it is the only one in the air.
  bool add(std::shared_ptr<Flight> flight) {
    ++num_launched_;
    const std::lock_guard lock(mutex_);
    flights_.push_back(std::move(flight));
    return flights_.size() == 1;
  }

  // Gives a task a place in line: a later one must not overtake it. Returns false, and gives none, if nothing is in the
  // air.
  bool add_task() {
    const std::lock_guard lock(mutex_);
    if (flights_.empty()) return false;
    flights_.push_back(nullptr);
    return true;
  }

  // The first task in line is done.
  void end_task() {
    const std::lock_guard lock(mutex_);
    flights_.pop_front();
  }

  // The first flight in line has been reduced.
  void end(Flight& flight) {
    {
      const std::lock_guard lock(mutex_);
      flight.pending = nullptr;
      flights_.pop_front();
      ++num_reduced_;
    }
    reduced_.notify_all();
  }

  // See TwoWorkers.
  WaitEnd await_all_but(int64_t most, const Patience& patience) {
    constexpr std::chrono::milliseconds kLookEach{100};
    const auto now = [] { return std::chrono::steady_clock::now(); };
    int64_t before = num_reduced_;
    auto since = now();
    std::unique_lock lock(mutex_);
    while (num_launched_ - num_reduced_ > most && error_.empty() && !is_aborted_) {
      const auto wait = std::min(patience.least, kLookEach);
      if (reduced_.wait_for(lock, wait, [&] { return num_reduced_ > before; })) {
        before = num_reduced_;
        since = now();
      } else if (now() - since >= patience.least) {
        lock.unlock();
        if (now() - since >= patience.most) return WaitEnd::too_long;
        if (patience.ends()) return WaitEnd::in_vain;
        lock.lock();
      }
    }
    return WaitEnd::few;
  }

  // Notes an error, if it is the first one.
  void fail(const Flight& flight, const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (!error_.empty() || is_aborted_) return;
    error_ = "zerox: the gradients of " + flight.describe() + " did not arrive from all ranks: " + reason;
  }

  bool failed() const {
    const std::lock_guard lock(mutex_);
    return !error_.empty() || is_aborted_;
  }

  std::string error() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }

  // Tells what is known to be wrong: the first error, or what has not been reduced; empty if nothing is.
  std::string trouble() const {
    const std::lock_guard lock(mutex_);
    if (!error_.empty()) return error_;
    std::string text;
    for (const auto& flight : flights_) {
      if (flight) text += (text.empty() ? "still awaited: " : ", ") + flight->describe();
    }
    return text;
  }

  // The flight's messages are on the wire.
  template <class Pending>
  void set_pending(Flight& flight, Pending pending) {
    const std::lock_guard lock(mutex_);
    flight.pending = std::move(pending);
    if (is_aborted_) flight.pending->abort();
  }

  // Wakes who waits for messages, now and later.
  void abort() {
    const std::lock_guard lock(mutex_);
    is_aborted_ = true;
    for (const auto& flight : flights_) {
      if (flight && flight->pending) flight->pending->abort();
    }
  }

  int64_t num_launched() const { return num_launched_; }
  int64_t num_reduced() const { return num_reduced_; }

 private:
  std::atomic<int64_t> num_launched_{0};
  std::atomic<int64_t> num_reduced_{0};
  mutable Mutex<LockRank::airborne> mutex_;  // of all below, and of each flight's `pending`
  Condition reduced_;
  std::deque<std::shared_ptr<Flight>> flights_;  // launched and not reduced; null for a task
  std::string error_;                            // the first one
  bool is_aborted_ = false;
};

}  // namespace zx
