// Answers what other ranks ask of this one's state by message: see Notes [State is pulled] and [Questions].
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>

#include "locks.h"
#include "peers/published_state.h"
#include "peers/question_server.h"
#include "peers/state_questions.h"

namespace zx {

// A part that is asked for is copied when it is asked for, so no copy of the state is kept. Any thread may call any of
// these, and none needs the GIL.
class StateServer {
 public:
  // `group`: over gloo. `is_pinned`: whether copies from a device need that.
  StateServer(const Group& group, bool is_pinned);

  // Ranks that ask before find that it is not there yet.
  void serve(const std::shared_ptr<const PublishedState>& state);

  // The last that a rank has told of itself.
  Told told_by(int rank) const { return server_.told_by(rank); }

 private:
  void hear(const HeardQuestion& heard);
  at::Tensor stamp_of(const PublishedState* state) const;
  at::Tensor part_of(const PublishedState* state, const HeardQuestion& heard);
  at::Tensor empty(int64_t bytes) const;

  const bool is_pinned_;
  const at::Tensor nothing_;
  Mutex<LockRank::state_server> mutex_;  // of what is served
  std::weak_ptr<const PublishedState> state_{};
  StateStamp failed_ = StateStamp(-1);  // that of the state which could not be read; of the server's thread
  QuestionServer server_;               // ends first
};

}  // namespace zx
