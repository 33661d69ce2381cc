#include "peers/questions.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

namespace zx {
namespace {

constexpr std::chrono::milliseconds kSent{2000};

at::Tensor tensor_of(const std::vector<int64_t>& numbers) {
  const at::Tensor packed = at::empty({static_cast<int64_t>(numbers.size())}, at::kLong);
  std::copy(numbers.begin(), numbers.end(), packed.mutable_data_ptr<int64_t>());
  return packed;
}

}  // namespace

at::Tensor HeardQuestion::packed() const {
  std::vector<int64_t> numbers{rank, tag, static_cast<int64_t>(rest.size())};
  numbers.insert(numbers.end(), what.begin(), what.end());
  return tensor_of(numbers);
}

at::Tensor HeardQuestion::packed_rest() const { return tensor_of(rest); }

HeardQuestion HeardQuestion::unpack(const at::Tensor& numbers, int64_t& num_rest) {
  const auto* at = numbers.const_data_ptr<int64_t>();
  num_rest = at[2];
  return {static_cast<int>(at[0]), static_cast<int>(at[1]), {at + kHeader, at + numbers.numel()}};
}

Questions::Questions(const Group& group, QuestionKind kind)
    : group_(group), backend_(group->getBackend(c10::DeviceType::CPU)), kind_(kind) {}

Questions::~Questions() {
  try {
    for (const Asked& each : told_) each.sending[0]->wait(kSent);
  } catch (const std::exception&) {  // a rank is gone or stopped, and all connections are closed now
  }
}

std::pair<int, int64_t> Questions::take_tag() {
  const std::lock_guard lock(mutex_);
  const int64_t number = num_messages_++;
  if (free_tags_.empty()) return {num_tags_++, number};
  const int tag = free_tags_.back();
  free_tags_.pop_back();
  return {tag, number};
}

Questions::Asked Questions::ask(int peer, const std::vector<int64_t>& what, const at::Tensor& answer,
                                const std::vector<int64_t>& rest) {
  const auto [tag, number] = take_tag();
  const HeardQuestion question{group_->getRank(), tag, what, rest};
  Asked asked{peer, tag, number, {question.packed(), answer, question.packed_rest()}};
  std::vector<at::Tensor> received{answer};
  std::vector<at::Tensor> sent{asked.messages[0]};
  asked.receiving = backend_->recv(received, peer, kind_.tag_of_answer(asked.tag));
  asked.sending[0] = backend_->send(sent, peer, kind_.tag_of_questions());
  std::vector<at::Tensor> further{asked.messages[2]};
  if (!rest.empty()) asked.sending[1] = backend_->send(further, peer, kind_.tag_of_rest(asked.tag));
  return asked;
}

// Messages in one tag come in order: with the question all that the rank was told before has arrived.
void Questions::end(const Asked& asked) {
  const std::lock_guard lock(mutex_);
  free_tags_.push_back(asked.tag);
  std::erase_if(told_, [&](const Asked& each) { return each.peer == asked.peer && each.number < asked.number; });
}

void Questions::abandon(const Asked& asked) {
  const std::lock_guard lock(mutex_);
  abandoned_.push_back(asked);
}

bool Questions::tell(int peer, Told what) {
  HeardQuestion question{group_->getRank(), HeardQuestion::kTold, std::vector<int64_t>(kind_.num_numbers)};
  question.what[0] = static_cast<int64_t>(what);
  try {
    std::vector<at::Tensor> sent{question.packed()};
    const std::lock_guard lock(mutex_);  // its number is that of its place among all
    const Work sending = backend_->send(sent, peer, kind_.tag_of_questions());
    told_.push_back({peer, question.tag, num_messages_++, {sent[0]}, {sending}});
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace zx
