#include "peers/state_questions.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <deque>
#include <stdexcept>

namespace zx {
namespace {

constexpr size_t kMostBytes = size_t{16} << 20;  // of an answer
constexpr size_t kAtOnce = 2;                    // answers: one is copied while the other travels

}  // namespace

void StateQuestions::begin_use() {
  const std::lock_guard lock(mutex_);
  ++num_uses_;
}

// Told under the lock: what another thread asks next comes later.
void StateQuestions::end_use() {
  const std::lock_guard lock(mutex_);
  if (--num_uses_ > 0) return;
  for (const int rank : asked_) {
    if (!abandoned_.contains(rank)) questions_.tell(rank, Told::is_through);
  }
  asked_.clear();
}

void StateQuestions::await(const Questions::Asked& asked, LongWait& wait) {
  if (!wait.await(*group_, *asked.receiving, asked.peer, /*is_answer=*/true))
    throw std::runtime_error("the read was aborted");
  questions_.end(asked);
}

// Its answers may still be on their way, so the rank is not told that nobody needs them.
void StateQuestions::abandon(const std::deque<Questions::Asked>& asked) {
  const std::lock_guard lock(mutex_);
  for (const auto& each : asked) {
    questions_.abandon(each);
    abandoned_.insert(each.peer);
  }
}

StateSource::Directory StateQuestions::ask(int rank, LongWait& wait) {
  const at::Tensor answer = at::full({2}, kFailed, at::kLong);  // until there is another answer
  const auto asked = questions_.ask(rank, StateQuestion{}.numbers(), answer);
  try {
    await(asked, wait);
  } catch (...) {
    abandon({asked});
    throw;
  }
  const auto* numbers = answer.const_data_ptr<int64_t>();
  if (numbers[1] == kFailed) throw std::runtime_error("it can't read its own state");
  return {StateStamp(numbers[0]), static_cast<size_t>(numbers[1])};
}

std::optional<StateSource::Directory> StateQuestions::look(int rank, int64_t version, LongWait& wait) {
  Directory found = ask(rank, wait);
  if (found.stamp.version() < version || found.stamp.is_changing()) return std::nullopt;
  return found;
}

// A rank answers questions in their order: if its state has the same stamp in the last answer, it had it in all.
bool StateQuestions::read(int rank, const Directory& from, size_t place, size_t start, const at::Tensor& into,
                          LongWait& wait) {
  {
    const std::lock_guard lock(mutex_);
    asked_.insert(rank);
  }
  auto* const to = static_cast<char*>(into.mutable_data_ptr());
  const size_t bytes = into.nbytes();
  size_t next = 0;
  std::deque<Questions::Asked> on_their_way;
  try {
    while (next < bytes || !on_their_way.empty()) {
      while (next < bytes && on_their_way.size() < kAtOnce) {
        const size_t count = std::min(kMostBytes, bytes - next);
        const auto keep = [into](void*) {};
        const at::Tensor part = at::from_blob(to + next, {static_cast<int64_t>(count)}, keep, at::kByte);
        const StateQuestion question{from.stamp.word(), static_cast<int64_t>(place), static_cast<int64_t>(start + next),
                                     static_cast<int64_t>(count)};
        on_their_way.push_back(questions_.ask(rank, question.numbers(), part));
        next += count;
      }
      await(on_their_way.front(), wait);
      on_their_way.pop_front();
    }
  } catch (...) {
    abandon(on_their_way);
    throw;
  }
  return ask(rank, wait).stamp == from.stamp;
}

}  // namespace zx
