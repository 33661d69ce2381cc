// Asks other ranks for their state by message, where their memory can't be read: see Notes [State is pulled] and
// [Questions].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "locks.h"
#include "peers/failure_detector.h"
#include "peers/published_state.h"
#include "peers/questions.h"
#include "peers/state_source.h"

namespace zx {

// What travels. A rank answers at once, whatever stamp its state has: who asks looks again.
struct StateQuestion {
  // `bytes` of a place from `start` on, if the state has this stamp; 0: which stamp it has, and how many places.
  int64_t stamp = 0;
  int64_t place = 0;
  int64_t start = 0;
  int64_t bytes = 0;

  static constexpr QuestionKind kKind{4, TagKind::state_question, TagKind::state_answer, TagKind::state_rest};
  std::vector<int64_t> numbers() const { return {stamp, place, start, bytes}; }
  static StateQuestion of(const std::vector<int64_t>& numbers) {
    return {numbers.at(0), numbers.at(1), numbers.at(2), numbers.at(3)};
  }
};

class StateQuestions final : public StateSource {
 public:
  // `group`: over gloo.
  explicit StateQuestions(const Group& group) : group_(group), questions_(group, StateQuestion::kKind) {}

  static constexpr int64_t kFailed = -1;  // instead of a number of places: what the rank has sent is no state

  std::optional<Directory> look(int rank, int64_t version, LongWait& wait) override;
  bool read(int rank, const Directory& from, size_t place, size_t start, const at::Tensor& into,
            LongWait& wait) override;

  // When none is in use, the others free what they have sent.
  void begin_use() override;
  void end_use() override;

  // Whether the rank could be told: it is there. Never throws.
  bool tell(int rank, Told what) { return questions_.tell(rank, what); }

 private:
  void await(const Questions::Asked& asked, LongWait& wait);
  void abandon(const std::deque<Questions::Asked>& asked);
  Directory ask(int rank, LongWait& wait);

  const Group group_;
  Questions questions_;
  Mutex<LockRank::state_questions> mutex_;  // of all below
  int num_uses_ = 0;
  std::set<int> asked_{};      // since nobody asked
  std::set<int> abandoned_{};  // ranks that may still be sending an answer which nobody waits for
};

}  // namespace zx
