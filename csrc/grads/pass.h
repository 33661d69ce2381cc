// One backward, as far as it can be seen from the hooks inside it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "grads/decision.h"

namespace zx {

// Note [How a backward ends]
// The first hook in a graph task queues a callback that autograd runs when the task is done. A reentrant checkpoint
// runs a task inside another one, and the inner task's end is not the end of backward. So while an outer node is being
// evaluated, the remaining buckets stay back until an outer task is seen to end, or the optimizer is called. When a
// backward raises, autograd destroys the task and its callbacks instead of running them. The callback holds an
// EndToken: a token that dies unused shows that backward raised. The first task whose end is awaited is the outermost
// one that is seen: while it lasts, the end of another task is not the end of backward. Where a wrapper's whole forward
// is recomputed inside a backward, the task that follows is all of its backward, and no outer one is ever seen.
struct EndToken {
  explicit EndToken(std::shared_ptr<bool> raised) : raised_(std::move(raised)) {}
  EndToken(const EndToken&) = delete;
  EndToken& operator=(const EndToken&) = delete;
  ~EndToken() {
    if (!used) *raised_ = true;
  }
  bool used = false;

 private:
  std::shared_ptr<bool> raised_;
};

struct Pass {
  bool open = false;
  int64_t first_task = -1;  // the first graph task whose end is awaited, while it lasts
  int64_t last_task = -1;   // the last one
  int64_t whole_task = -1;  // one that runs the whole backward of a forward, though it may be inside another one
  bool is_static = false;   // some gradient's wrapper says so: see Note [Several gradients in one backward]
  bool again = false;       // see there
  std::shared_ptr<bool> raised = std::make_shared<bool>(false);
  std::vector<std::shared_ptr<Decision>> decided{};  // of the gradients that leave: see Note [Forward decides]

  void note(const std::shared_ptr<Decision>& decision) {
    if (decision != nullptr && std::find(decided.begin(), decided.end(), decision) == decided.end()) {
      decided.push_back(decision);
    }
  }
  void end() {
    open = false;
    for (const auto& decision : std::exchange(decided, {})) decision->note_sent();
  }
};

}  // namespace zx
