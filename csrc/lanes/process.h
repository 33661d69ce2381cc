// Which process made something: a forked child has it too, and can do little with it.
#pragma once

#include <cstdint>
#include <mutex>

namespace zx {

// Note [Forks]
// A forked child has its parent's memory as it was, and none of its threads: a lock may be held, and a queue emptied,
// by one that is not there. Sockets and epoll instances it shares with the parent: what it closes or unregisters there
// is gone for the parent too, which gloo then ends. So in a child nobody waits, sends, or destroys what the parent made
// (it is leaked); whoever asks for that gets an error in one line.
//
// What is left is reading. Hidden gathers arrive before a fork of Python's (ReadGuard::before_fork,
// zerox/ranks/forks.py), so that its child finds parameters whole. Forks that Python does not know of wait for nothing,
// as nearly all of them start another program; if parameters were on their way there, the child is told when it reads
// them.

// The process that made this object.
class Process {
 public:
  Process();

  bool is_this() const;

  // Throws std::runtime_error in a forked child.
  void check() const;

 private:
  int64_t num_forks_;  // between the first process and this one
};

// Can't be locked in a forked child, where nobody may be there to unlock it: throws.
class ProcessMutex {
 public:
  void lock() {
    process_.check();
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }

 private:
  Process process_;
  std::mutex mutex_;
};

}  // namespace zx
