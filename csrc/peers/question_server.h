// Hears what other ranks ask of this one by message, and sends the answers: see Note [Questions].
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "locks.h"
#include "peers/failure_detector.h"
#include "peers/questions.h"

namespace zx {

// Any thread may call any of these, and none needs the GIL.
class QuestionServer {
 public:
  // `group`: over gloo. `name`, of at most 15 characters, is that of its thread, which calls `hear` for each question,
  // without a lock. The answer may come later.
  using Hear = std::function<void(HeardQuestion)>;
  QuestionServer(const Group& group, QuestionKind kind, const char* name, Hear hear);
  // Only when nobody asks any more.
  ~QuestionServer();
  QuestionServer(const QuestionServer&) = delete;
  QuestionServer& operator=(const QuestionServer&) = delete;

  // The message is kept until the tag is used again, or the rank is through.
  void answer(int rank, int tag, at::Tensor message);

  // What was sent in this tag last, and nobody reads any more when it is used again; undefined if there is nothing.
  at::Tensor last_answer(int rank, int tag) const;

  // The last that a rank has told of itself.
  Told told_by(int rank) const;

 private:
  struct Answer {
    Work sending;
    at::Tensor message;
  };
  struct Asker {
    Told told = Told::nothing;
    std::vector<Answer> answers;  // by tag: the last one in it
  };

  // A question that may come. Several are awaited at a time: gloo keeps those that come while none is, and if such a
  // rank dies then, it finds nothing else any more.
  struct Listening {
    at::Tensor numbers;
    Work work;
  };

  void serve();
  bool listen(std::deque<Listening>& awaited);
  bool hear(HeardQuestion heard, int64_t num_rest);
  bool receive(const Work& work);
  bool is_stopping() const;
  void note(int rank, Told told);

  const Group group_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  const QuestionKind kind_;
  const char* const name_;
  const Hear hear_;
  mutable Mutex<LockRank::question_server> mutex_;  // of all below but the thread
  std::vector<Asker> askers_;                       // by rank
  Work listening_{};
  bool stopping_ = false;
  std::thread thread_{};
};

}  // namespace zx
