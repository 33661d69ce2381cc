// The state of all ranks of an optimizer, which any rank reads when it likes. See Note [State is pulled].
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "peers/failure_detector.h"
#include "peers/linger.h"
#include "peers/published_state.h"
#include "peers/state_reader.h"

namespace zx {

// Any thread may call any of these, and none needs the GIL.
class PeerStates {
 public:
  // `own`: this rank's; `control_blocks`: those of all ranks' PublishedState, and `processes` theirs, none of them 0.
  PeerStates(std::shared_ptr<PublishedState> own, std::shared_ptr<FailureDetector> failure_detector,
             std::shared_ptr<Linger> linger, std::vector<int64_t> processes, std::vector<uint64_t> control_blocks);
  // This rank reads nothing any more; its own state lingers.
  ~PeerStates();
  PeerStates(const PeerStates&) = delete;
  PeerStates& operator=(const PeerStates&) = delete;

  // While one lives, step() waits.
  class Pull {
   public:
    explicit Pull(PeerStates& states) : states_(states) {
      ++states_.num_pulls_;
      innermost_ = this;
    }
    ~Pull() {
      innermost_ = outer_;
      --states_.num_pulls_;
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

  struct Directory {
    int64_t stamp;
    std::vector<int64_t> addresses;
  };
  // That of a rank, this one too, at this version. Nothing if it has gone on to another one, or this rank has. Throws
  // std::runtime_error that names a rank that is gone, that does not come to it in time, or whose state is broken.
  std::optional<Directory> read_directory(int rank, int64_t version) const;
  // Copies what lies at an address of a rank. False if its state has changed since its directory had this stamp.
  bool read(int rank, int64_t stamp, uint64_t address, const at::Tensor& into) const;

 private:
  int num_pulls_here() const;
  std::optional<StateStamp> await(int rank, int64_t version) const;

  const std::shared_ptr<PublishedState> own_;
  const std::shared_ptr<FailureDetector> failure_detector_;
  const std::shared_ptr<Linger> linger_;
  std::optional<Linger::Reader> reader_;
  const StateReader states_;
  std::atomic<int> num_pulls_ = 0;
  std::atomic<bool> are_ended_ = false;
};

}  // namespace zx
