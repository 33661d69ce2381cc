#include "peers/state_server.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <exception>
#include <utility>

namespace zx {

StateServer::StateServer(const Group& group, bool is_pinned)
    : is_pinned_(is_pinned),
      nothing_(at::zeros({1}, at::kByte)),
      server_(group, StateQuestion::kKind, "zerox state", [this](const HeardQuestion& heard) { hear(heard); }) {}

void StateServer::serve(const std::shared_ptr<const PublishedState>& state) {
  const std::lock_guard lock(mutex_);
  state_ = state;
}

void StateServer::hear(const HeardQuestion& heard) {
  std::shared_ptr<const PublishedState> state;
  {
    const std::lock_guard lock(mutex_);
    state = state_.lock();
  }
  const bool wants_part = StateQuestion::of(heard.what).bytes > 0;
  at::Tensor answer = nothing_;  // a byte, which ends a wait for more
  try {
    answer = wants_part ? part_of(state.get(), heard) : stamp_of(state.get());
  } catch (const std::exception&) {  // there is no memory
    if (state) failed_ = state->now();
  }
  server_.answer(heard.rank, heard.tag, std::move(answer));
}

at::Tensor StateServer::stamp_of(const PublishedState* state) const {
  const at::Tensor answer = at::empty({2}, at::kLong);
  auto* numbers = answer.mutable_data_ptr<int64_t>();
  numbers[0] = state == nullptr ? StateStamp::gone().word() : state->now().word();
  numbers[1] = state == nullptr ? 0 : static_cast<int64_t>(state->num_places());
  if (failed_ == StateStamp(numbers[0])) numbers[1] = StateQuestions::kFailed;
  return answer;
}

// If the state has another stamp by now it is garbage, and if it can't be read: the next stamp says so, to all.
at::Tensor StateServer::part_of(const PublishedState* state, const HeardQuestion& heard) {
  const StateQuestion question = StateQuestion::of(heard.what);
  at::Tensor part = server_.last_answer(heard.rank, heard.tag);
  if (!part.defined() || part.scalar_type() != at::kByte || part.numel() != question.bytes) {
    part = empty(question.bytes);
  }
  try {
    if (state != nullptr) {
      state->read(StateStamp(question.stamp), static_cast<size_t>(question.place), static_cast<size_t>(question.start),
                  part.mutable_data_ptr(), part.nbytes());
    }
  } catch (const std::exception&) {
    failed_ = StateStamp(question.stamp);
  }
  return part;
}

at::Tensor StateServer::empty(int64_t bytes) const {
  const auto options = at::TensorOptions().dtype(at::kByte);
  try {
    return at::empty({bytes}, options.pinned_memory(is_pinned_));
  } catch (const std::exception&) {  // there is no more that can be pinned: copies are slower
    return at::empty({bytes}, options);
  }
}

}  // namespace zx
