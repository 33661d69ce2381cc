// Tells which process made an object: a forked child has the object too, and can do little with it.
#pragma once

#include <cstdint>
#include <mutex>

#include "locks.h"

namespace zx {

// Note [Forks]
// A forked child has its parent's memory as it was, and none of its threads: a lock may be held, and a queue may have
// to be emptied, by a thread that is not there. The child shares sockets and epoll instances with the parent: if the
// child closes or unregisters one, it is gone for the parent too, and gloo then ends the parent. So a child never
// waits, sends, or destroys what the parent made (which is leaked instead); a call that would do so raises an error in
// one line.
//
// A child can still read. Hidden gathers arrive before a fork by Python (ReadGuard::before_fork, zerox/ranks/forks.py),
// so that the child finds parameters whole. Forks that Python does not know of wait for nothing, as nearly all of them
// start another program. If parameters were on their way then, the child is told so when it reads them.

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

// Throws when it is locked in a forked child: the thread that would unlock it may not be there.
template <LockRank kRank>
class ProcessMutex {
 public:
  void lock() {
    process_.check();
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }

 private:
  Process process_;
  Mutex<kRank> mutex_;
};

}  // namespace zx
