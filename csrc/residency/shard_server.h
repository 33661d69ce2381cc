// Answers what other ranks ask of this one's shards: see Note [Shards by message].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "locks.h"
#include "peers/failure_detector.h"
#include "residency/shard_questions.h"
#include "residency/shard_stamps.h"

namespace zx {

// Any thread may call any of these, and none needs the GIL.
class ShardServer {
 public:
  // `group`: over gloo.
  explicit ShardServer(const Group& group);
  // Only when nobody asks any more.
  ~ShardServer();
  ShardServer(const ShardServer&) = delete;
  ShardServer& operator=(const ShardServer&) = delete;

  // This rank's shard of the next bucket, in an order that is the same on all ranks. Both must outlive this object.
  void add(at::Tensor shard, const SharedStamps& stamps);
  // To be called after a stamp has changed.
  void stamps_changed();

  // Whether the rank has said that it will ask nothing more.
  bool has_left(int rank) const;

 private:
  struct Shard {
    at::Tensor values;
    const SharedStamps& stamps;
  };
  struct Answer {
    Work sending;
    at::Tensor message;
  };
  struct Asker {
    bool has_left = false;
    std::vector<Answer> answers;  // by tag: the last one in it
  };

  void serve();
  bool listen();
  void answer_what_can_be();
  void answer(const AskedBy& asked);
  at::Tensor answer_to(const AskedBy& asked) const;
  bool receive(const Work& work);
  bool is_stopping() const;
  bool can_be_answered(const Question& question) const;

  const Group group_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  mutable Mutex<LockRank::shard_server> mutex_;  // of all below but the thread
  std::deque<Shard> shards_;                     // by bucket
  std::vector<Asker> askers_;                    // by rank
  std::vector<AskedBy> kept_;
  Work listening_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace zx
