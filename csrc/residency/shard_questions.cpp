#include "residency/shard_questions.h"

#include <ATen/ops/empty.h>

#include <exception>
#include <utility>

#include "params/read_guard.h"

namespace zx {

at::Tensor AskedBy::packed() const {
  const at::Tensor packed = at::empty({kNumbers}, at::kLong);
  auto* numbers = packed.mutable_data_ptr<int64_t>();
  for (const int64_t each : {question.bucket, question.version, question.written, question.stored,
                             int64_t{question.wants_shard}, question.num_pieces, int64_t{rank}, int64_t{tag}}) {
    *numbers++ = each;
  }
  return packed;
}

AskedBy AskedBy::unpack(const at::Tensor& numbers) {
  const auto* at = numbers.const_data_ptr<int64_t>();
  return {{at[0], at[1], at[2], at[3], at[4] != 0, at[5]}, static_cast<int>(at[6]), static_cast<int>(at[7])};
}

at::Tensor AskedBy::pack_pieces(const std::vector<BytePiece>& pieces) {
  const at::Tensor packed = at::empty({static_cast<int64_t>(pieces.size()), 2}, at::kLong);
  auto* numbers = packed.mutable_data_ptr<int64_t>();
  for (const BytePiece& piece : pieces) {
    *numbers++ = static_cast<int64_t>(piece.from);
    *numbers++ = static_cast<int64_t>(piece.bytes);
  }
  return packed;
}

ShardQuestions::ShardQuestions(Communicator comm)
    : comm_(std::move(comm)), backend_(comm_.group->getBackend(c10::DeviceType::CPU)) {}

int ShardQuestions::take_tag() {
  const std::lock_guard lock(mutex_);
  if (free_tags_.empty()) return num_tags_++;
  const int tag = free_tags_.back();
  free_tags_.pop_back();
  return tag;
}

ShardQuestions::Asked ShardQuestions::ask(int peer, const Question& question, const at::Tensor& answer,
                                          const std::vector<BytePiece>& pieces) {
  const ReadGuard::Pause pause;
  AskedBy by_me{question, comm_.group->getRank(), take_tag()};
  by_me.question.num_pieces = static_cast<int64_t>(pieces.size());
  Asked asked{peer, by_me.tag, {by_me.packed(), answer, AskedBy::pack_pieces(pieces)}};
  comm_.needing(peer, [&] {
    std::vector<at::Tensor> received{answer};
    std::vector<at::Tensor> sent{asked.messages[0]};
    asked.receiving = backend_->recv(received, peer, by_me.tag_of_answer());
    asked.sending[0] = backend_->send(sent, peer, AskedBy::tag_of_questions());
    std::vector<at::Tensor> wanted{asked.messages[2]};
    if (!pieces.empty()) asked.sending[1] = backend_->send(wanted, peer, by_me.tag_of_pieces());
  });
  return asked;
}

void ShardQuestions::await(const Asked& asked) {
  comm_.await({asked.receiving, asked.peer});
  const std::lock_guard lock(mutex_);
  free_tags_.push_back(asked.tag);
}

void ShardQuestions::leave_failure_record(int peer) {
  const ReadGuard::Pause pause;
  const AskedBy by_me{{}, comm_.group->getRank(), AskedBy::kFailureRecord};
  std::vector<at::Tensor> sent{by_me.packed()};
  try {
    const Work sending = backend_->send(sent, peer, AskedBy::tag_of_questions());
    const std::lock_guard lock(mutex_);
    failure_records_.push_back({peer, by_me.tag, {sent[0]}, sending});
  } catch (const std::exception&) {  // it is gone
  }
}

}  // namespace zx
