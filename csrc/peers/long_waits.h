// Looks after waits for other ranks that take long: says so, and ends those whose connection is gone.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>

#include "locks.h"
#include "peers/doing.h"

namespace zx {

// What is known of a wait.
struct WaitingFor {
  int rank;  // that waits
  std::string whom;
  std::string seen;  // where the awaited rank was last, or nothing
  std::chrono::milliseconds timeout;
  // Where the awaited rank waits for this one in turn; empty if it does not, as far as one knows. It owns what it uses.
  std::function<std::string()> stands_outside{};

  std::string line(const std::string& doing, std::chrono::seconds waited) const;
};

// Writes a line to stderr, in one piece.
void say(const std::string& line);

// The awaited rank waits for this one.
class NeverComes : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A message from or to another rank, which a thread waits for. See Note [Waits that gloo forgets].
class AwaitedMessage {
 public:
  AwaitedMessage() = default;  // none
  AwaitedMessage(c10d::ProcessGroup& group, c10d::Work& work, int peer, bool is_answer)
      : group_(&group), work_(&work), peer_(peer), is_answer_(is_answer) {}

  // Ends the wait for it, if its connection is gone. Returns whether it did so now.
  bool end_if_lost();
  bool is_lost() const { return is_lost_; }
  void end_if_vain() {
    if (work_ != nullptr && !is_answer_) work_->abort();
  }

 private:
  bool is_connected() const;

  c10d::ProcessGroup* group_ = nullptr;
  c10d::Work* work_ = nullptr;
  int peer_ = 0;
  bool is_answer_ = false;
  bool is_lost_ = false;
};

// A wait of this thread for other ranks, as long as the object lives. After `say_after` (0: never) one line about it
// goes to stderr.
class LongWait {
 public:
  using Clock = std::chrono::steady_clock;

  LongWait(std::chrono::milliseconds say_after, std::function<WaitingFor()> describe);
  ~LongWait();
  LongWait(const LongWait&) = delete;

  // Does what work->wait() does, for a message of `group` from or to its rank `peer`. Also throws if its connection is
  // gone, and as check() does, but for an answer of a rank's server, which comes whatever its script waits for.
  bool await(c10d::ProcessGroup& group, c10d::Work& work, int peer, bool is_answer = false);

  // To be called in a loop that waits: throws NeverComes if this thread's wait can't end well.
  static void check() {
    if (current_ != nullptr && current_->is_vain_) throw NeverComes(current_->why_);
  }

  Clock::duration waited() const { return Clock::now() - start_; }

 private:
  friend class LongWaits;

  const std::chrono::milliseconds say_after_;
  const std::function<WaitingFor()> describe_;
  const Doing* const doing_ = Doing::current();
  const Clock::time_point start_ = Clock::now();
  LongWait* const outer_ = current_;
  static thread_local LongWait* current_;

  bool is_said_ = false;  // these under LongWaits::mutex_
  AwaitedMessage message_;
  Clock::time_point asked_ = start_;
  std::string why_;  // does not change once the wait is vain
  std::atomic<bool> is_vain_{false};
};

// All waits for other ranks are listed here, whatever they wait for: messages, what neighbours write, collectives, the
// store. One thread looks after them. A rank that waits can't know whether the others are slow or will never come, and
// the group's timeout is half an hour and more: so the thread says, once, of each wait that takes a minute.
//
// Note [Waits that gloo forgets]
// When a connection ends, gloo wakes the waits for messages that have not begun. It forgets a wait for a message that
// was being sent or received just then, which would last until the timeout. So the thread also asks whether the
// connection of a long wait is still there, by starting a message that nothing receives, and ends those whose
// connection is gone.
//
// Note [Two waits for each other]
// A call that one rank alone makes is an error where the others come to another one. If they wait in a barrier of a
// framework's, nobody comes anywhere. So a rank says in the store that it goes into such a barrier, its n-th. A rank in
// a call of its user's that needs it reads that. If it has not been at its own n-th barrier yet, both would wait until
// the timeout, and it raises.
class LongWaits {
 public:
  // Of this process. Leaked, as their thread never ends. A forked child has no such thread, and must not wait.
  static LongWaits& all();

 private:
  friend class LongWait;
  void add(LongWait& wait);
  void remove(LongWait& wait);
  void watch();
  bool has_said(int rank) const;
  void end_vain_waits();

  Mutex<LockRank::long_waits> mutex_;  // of all below, and of what changes in a wait
  bool has_thread_ = false;
  std::set<LongWait*> waits_;
};

}  // namespace zx
