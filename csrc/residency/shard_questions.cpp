#include "residency/shard_questions.h"

#include "params/read_guard.h"

namespace zx {

Questions::Asked ShardQuestions::ask(int peer, const Question& question, const at::Tensor& answer,
                                     const std::vector<BytePiece>& pieces) {
  const ReadGuard::Pause pause;
  std::vector<int64_t> wanted;  // where each begins in the shard, and how many bytes it has
  for (const BytePiece& piece : pieces) {
    wanted.push_back(static_cast<int64_t>(piece.from));
    wanted.push_back(static_cast<int64_t>(piece.bytes));
  }
  return comm_.needing(peer, [&] { return questions_.ask(peer, question.numbers(), answer, wanted); });
}

void ShardQuestions::await(const Questions::Asked& asked) {
  comm_.await({asked.receiving, asked.peer});
  questions_.end(asked);
}

void ShardQuestions::say_left(int peer) {
  const ReadGuard::Pause pause;
  questions_.tell(peer, Told::asks_no_more);
}

}  // namespace zx
