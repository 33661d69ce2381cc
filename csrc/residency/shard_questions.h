// What a rank asks others whose memory it can't read: for a shard, or whether one has come so far.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "peers/failure_detector.h"
#include "peers/neighbours.h"
#include "peers/questions.h"

namespace zx {

// Note [Shards by message]
// A rank on another machine is asked for its shard, at any time and in any order, as one's memory is read: see Note
// [Questions]. A question says how far the shard must have come. If it has not, the question is kept, and whoever
// changes a stamp answers what can be answered then. So nothing polls over a wire. If only pieces of a shard are
// wanted, a second message says which.

// Who has written a bucket outside step(): `everywhere`, or one stands by, or one goes on without a write.
enum class Written : uint8_t { everywhere, one_stands_by, here_only };

// The least that the stamps of a bucket must be: see Note [Shards are pulled].
struct Question {
  int64_t bucket = 0;
  int64_t version = 0;
  int64_t written = 0;
  int64_t stored = 0;
  int64_t came = INT64_MAX;  // or the rank is beyond that
  bool wants_shard = false;  // else a byte will do: Written

  static constexpr QuestionKind kKind{6, TagKind::question, TagKind::answer, TagKind::wanted};
  std::vector<int64_t> numbers() const { return {bucket, version, written, stored, came, int64_t{wants_shard}}; }
  static Question of(const std::vector<int64_t>& numbers) {
    return {numbers.at(0), numbers.at(1), numbers.at(2), numbers.at(3), numbers.at(4), numbers.at(5) != 0};
  }
};

// Any thread may call any of these, and none needs the GIL.
class ShardQuestions {
 public:
  // `comm`: a gloo group.
  explicit ShardQuestions(Communicator comm) : comm_(std::move(comm)), questions_(comm_.group, Question::kKind) {}

  // Starts asking rank `peer`, whose answer will be in `answer`: the whole shard if it wants that, or pieces of it, if
  // there are any. Throws as FailureDetector::needing().
  Questions::Asked ask(int peer, const Question& question, const at::Tensor& answer,
                       const std::vector<BytePiece>& pieces = {});
  // Returns when the answer is there. Throws as FailureDetector::await().
  void await(const Questions::Asked& asked);

  // This rank will ask `peer` nothing more. Never throws.
  void say_left(int peer);

 private:
  const Communicator comm_;
  Questions questions_;
};

}  // namespace zx
