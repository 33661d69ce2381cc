// What a rank asks others by message, at any time and in any order.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "locks.h"
#include "peers/failure_detector.h"
#include "peers/tags.h"

namespace zx {

// Note [Questions]
// Ranks read each other's shards and state whenever they like, and the others take no part. Where a rank can't read
// another one's memory it asks, and a thread of the other one answers: QuestionServer. That is never the script's own,
// which may sleep, or compute, or hold the GIL.
//
// Questions come in one tag, from all ranks, and each names the tag of its answer. Nobody asks with a tag whose answer
// it has not received. So when a tag is used again, the last answer in it is through.

// What is asked, as int64 numbers of one length, and those of the messages' tags.
struct QuestionKind {
  int64_t num_numbers;
  TagKind question;
  TagKind answer;
  TagKind rest;  // of a second message, which has further numbers
  int tag_of_questions() const { return Tag(question, 0).number(); }
  int tag_of_answer(int tag) const { return Tag(answer, static_cast<unsigned>(tag)).number(); }
  int tag_of_rest(int tag) const { return Tag(rest, static_cast<unsigned>(tag)).number(); }
};

// What has no answer. Later ones count more.
enum class Told : int64_t {
  nothing,
  is_through,    // this rank has all answers that it wants now: what was sent may be freed
  asks_no_more,  // for good
  has_ended,     // its script, too
};

// As it travels.
struct HeardQuestion {
  int rank;                     // that asks
  int tag;                      // of the answer; kTold: `what` begins with a Told
  std::vector<int64_t> what;    // a QuestionKind's num_numbers
  std::vector<int64_t> rest{};  // of any length

  static constexpr int kTold = -1;
  static constexpr int64_t kHeader = 3;
  at::Tensor packed() const;
  at::Tensor packed_rest() const;
  // `num_rest`: how many numbers the second message has; 0: there is none.
  static HeardQuestion unpack(const at::Tensor& numbers, int64_t& num_rest);
};

// Any thread may call any of these, and none needs the GIL.
class Questions {
 public:
  // `group`: over gloo.
  Questions(const Group& group, QuestionKind kind);
  // Waits a little until what was told has been sent: of a message that has not, gloo says nothing to the other rank,
  // which would go on keeping what nobody reads.
  ~Questions();
  Questions(const Questions&) = delete;
  Questions& operator=(const Questions&) = delete;

  struct Asked {
    int peer;
    int tag;
    int64_t number;  // of all messages
    std::array<at::Tensor, 3> messages{};
    std::array<Work, 2> sending{};
    Work receiving{};
  };
  // Starts asking rank `peer`, whose answer is in `answer` once it has been received. Throws if the rank is gone.
  Asked ask(int peer, const std::vector<int64_t>& what, const at::Tensor& answer,
            const std::vector<int64_t>& rest = {});
  // It has been received.
  void end(const Asked& asked);
  // Nobody waits for its answer any more, which may come. gloo reads no more from a connection on which something
  // arrives for a receive that is gone, so it is kept.
  void abandon(const Asked& asked);

  // Whether the rank could be told: it is there. Never throws.
  bool tell(int peer, Told what);

 private:
  std::pair<int, int64_t> take_tag();

  const Group group_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  const QuestionKind kind_;
  Mutex<LockRank::questions> mutex_;  // of all below
  std::vector<int> free_tags_{};
  int num_tags_ = 0;
  int64_t num_messages_ = 0;
  std::vector<Asked> abandoned_{};
  std::vector<Asked> told_{};  // which may still be on their way
};

}  // namespace zx
