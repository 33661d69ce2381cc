// What a rank asks others whose memory it can't read: for a shard, or whether one has come so far.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "locks.h"
#include "peers/failure_detector.h"
#include "peers/neighbours.h"
#include "peers/tags.h"

namespace zx {

// Note [Shards by message]
// A rank on another machine is asked for its shard, at any time and in any order, as one's memory is read. A thread of
// its own answers: never its script's, which may sleep, or compute, or hold the GIL. A question says how far the shard
// must have come. If it has not, the question is kept, and whoever changes a stamp answers what can be answered then.
// So nothing polls over a wire.
//
// Questions come in one tag, from all ranks, and each names the tag of its answer. Nobody asks with a tag whose answer
// it has not received. So when a tag is used again, the last answer in it is through. If only pieces of a shard are
// wanted, a second message says which: see AskedBy::pack_pieces().

// The least that the stamps of a bucket must be: see Note [Shards are pulled].
struct Question {
  int64_t bucket = 0;
  int64_t version = 0;
  int64_t written = 0;
  int64_t stored = 0;
  bool wants_shard = false;  // else a byte will do
  int64_t num_pieces = 0;    // of the shard that are wanted; 0: all of it
};

// As it travels.
struct AskedBy {
  Question question;
  int rank;
  int tag;              // of the answer; kFailureRecord: this rank will ask nothing more
  at::Tensor pieces{};  // pack_pieces(), which travel by themselves; undefined if there are none

  static constexpr int kFailureRecord = -1;
  static constexpr int64_t kNumbers = 8;
  at::Tensor packed() const;
  static AskedBy unpack(const at::Tensor& numbers);
  // int64 [n, 2]: where they begin in the shard, and how many bytes each has.
  static at::Tensor pack_pieces(const std::vector<BytePiece>& pieces);
  static int tag_of_questions() { return Tag(TagKind::question, 0).number(); }
  int tag_of_answer() const { return Tag(TagKind::answer, static_cast<unsigned>(tag)).number(); }
  int tag_of_pieces() const { return Tag(TagKind::wanted, static_cast<unsigned>(tag)).number(); }
};

// Any thread may call any of these, and none needs the GIL.
class ShardQuestions {
 public:
  // `comm`: a gloo group.
  explicit ShardQuestions(Communicator comm);

  struct Asked {
    int peer;
    int tag;
    std::array<at::Tensor, 3> messages{};
    std::array<Work, 2> sending{};
    Work receiving{};
  };
  // Starts asking rank `peer`, whose answer will be in `answer`: the whole shard if it wants that, or pieces of it, if
  // there are any. Throws as FailureDetector::needing().
  Asked ask(int peer, const Question& question, const at::Tensor& answer, const std::vector<BytePiece>& pieces = {});
  // Returns when the answer is there. Throws as FailureDetector::await().
  void await(const Asked& asked);

  // This rank will ask `peer` nothing more. Never throws.
  void leave_failure_record(int peer);

 private:
  int take_tag();

  const Communicator comm_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  Mutex<LockRank::shard_questions> mutex_;  // of all below
  std::vector<int> free_tags_;
  int num_tags_ = 0;
  std::vector<Asked> failure_records_;
};

}  // namespace zx
