// The state of all ranks of an optimizer, which any rank reads when it likes. See Note [State is pulled].
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "locks.h"
#include "peers/failure_detector.h"
#include "peers/linger.h"
#include "peers/published_state.h"
#include "peers/state_source.h"

namespace zx {

// Any thread may call any of these, and none needs the GIL.
class PeerStates {
 public:
  // `own`: this rank's; `others`: where theirs comes from.
  PeerStates(std::shared_ptr<PublishedState> own, std::shared_ptr<FailureDetector> failure_detector,
             std::shared_ptr<Linger> linger, std::shared_ptr<StateSource> others);
  // This rank reads nothing any more; its own state lingers.
  ~PeerStates();
  PeerStates(const PeerStates&) = delete;
  PeerStates& operator=(const PeerStates&) = delete;

  // While one lives, step() waits.
  class Pull {
   public:
    explicit Pull(PeerStates& states) : states_(states) {
      states_.others_->begin_use();
      ++states_.num_pulls_;
      innermost_ = this;
    }
    ~Pull() {
      innermost_ = outer_;
      --states_.num_pulls_;
      states_.others_->end_use();
    }
    Pull(const Pull&) = delete;
    Pull& operator=(const Pull&) = delete;

   private:
    friend class PeerStates;
    static thread_local Pull* innermost_;  // of this thread
    Pull* const outer_ = innermost_;
    PeerStates& states_;
  };
  // Before ranks synchronize: returns when no other thread of this rank pulls. One that waits for another rank for long
  // finds nothing then: that rank may wait for this one.
  void await_pulls();

  // Copies bytes of a place of a rank's state, this one's too, at this version; a rank has `num_places`. False if it
  // has gone on to another version, or this rank has. Throws std::runtime_error that names a rank that is gone, that
  // does not come to it in time, or whose state is broken.
  bool read(int rank, int64_t version, size_t num_places, size_t place, size_t start, const at::Tensor& into);

 private:
  using Directory = StateSource::Directory;

  int num_pulls_here() const;
  std::optional<Directory> look(int rank, int64_t version, LongWait& wait) const;
  bool copy(int rank, const Directory& from, size_t place, size_t start, const at::Tensor& into, LongWait& wait) const;
  std::optional<Directory> find(int rank, int64_t version, LongWait& wait);
  std::optional<Directory> await(int rank, int64_t version, LongWait& wait) const;

  const std::shared_ptr<PublishedState> own_;
  const std::shared_ptr<FailureDetector> failure_detector_;
  const std::shared_ptr<Linger> linger_;
  std::optional<Linger::Reader> reader_;
  const std::shared_ptr<StateSource> others_;
  Mutex<LockRank::peer_states> mutex_;      // of the next one
  std::map<int, Directory> directories_{};  // by rank: the last ones
  std::atomic<int> num_pulls_ = 0;
  std::atomic<bool> are_ended_ = false;
};

}  // namespace zx
