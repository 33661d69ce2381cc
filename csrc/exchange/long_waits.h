// Ends waits for messages whose connection is gone.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <mutex>
#include <set>

#include "exchange/whereabouts.h"

namespace zx {

// Note [Waits that gloo forgets]
// When a connection ends, gloo wakes the waits for messages that have not begun. It forgets a wait for a message that
// was being sent or received just then, which would last until the timeout. So one thread looks after long waits: it
// asks whether their connection is still there, by starting a message that nothing receives, and ends those whose
// connection is gone.
class LongWaits {
 public:
  // Of this process. Leaked, as their thread never ends. A forked child has no such thread, and must not wait.
  static LongWaits& all();

  // Does what awaited.work->wait() does, for a message of `group`. Also throws if its connection is gone.
  bool wait_for(c10d::ProcessGroup& group, const Awaited& awaited);

 private:
  struct Wait {
    c10d::ProcessGroup& group;
    const Awaited& awaited;
    std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
    bool is_lost = false;
  };
  class Listed;
  void watch();
  static bool is_connected(const Wait& wait);

  std::mutex mutex_;  // of all below, and of each wait's is_lost
  bool has_thread_ = false;
  std::set<Wait*> waits_;
};

}  // namespace zx
