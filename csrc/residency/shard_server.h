// Answers what other ranks ask of this one's shards: see Note [Shards by message].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "locks.h"
#include "peers/question_server.h"
#include "residency/shard_questions.h"
#include "residency/shard_stamps.h"

namespace zx {

// Any thread may call any of these, and none needs the GIL.
class ShardServer {
 public:
  // `group`: over gloo.
  explicit ShardServer(const Group& group);

  // This rank's shard of the next bucket, in an order that is the same on all ranks. Both must outlive this object.
  void add(at::Tensor shard, const SharedStamps& stamps);
  // To be called after a stamp has changed.
  void stamps_changed();
  // This rank writes nothing any more: nobody waits for that.
  void come_no_more();

  // Whether another rank waits until this one writes, or comes.
  bool is_asked_for_writes();

  // Whether the rank has said that it will ask nothing more.
  bool has_left(int rank) const { return server_.told_by(rank) >= Told::asks_no_more; }

 private:
  struct Shard {
    at::Tensor values;
    const SharedStamps& stamps;
  };

  void hear(HeardQuestion heard);
  void answer_what_can_be();
  bool can_be_answered(const Question& question) const;
  at::Tensor answer_to(const HeardQuestion& heard) const;

  Mutex<LockRank::shard_server> mutex_;  // of all below but the server
  std::deque<Shard> shards_;             // by bucket
  std::vector<HeardQuestion> kept_;
  bool comes_no_more_ = false;
  QuestionServer server_;  // ends first
};

}  // namespace zx
