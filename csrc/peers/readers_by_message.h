// OtherReaders that tell each other by message.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "locks.h"
#include "peers/failure_detector.h"
#include "peers/other_readers.h"
#include "peers/state_questions.h"
#include "peers/state_server.h"

namespace zx {

class ReadersByMessage final : public OtherReaders {
 public:
  // `group`: over gloo, that of the other two.
  ReadersByMessage(const Group& group, std::shared_ptr<StateServer> server, std::shared_ptr<StateQuestions> questions);

  void count_reader(int more) override;
  void say_end() override { tell_all(Told::has_ended); }
  bool may_read(int rank) const override;
  bool has_ended(int rank) const override { return server_->told_by(rank) == Told::has_ended; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Seen {
    bool is_gone = false;
    Clock::time_point looked{};
  };

  void tell_all(Told what);
  bool is_connected(int rank) const;

  const Group group_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::shared_ptr<StateServer> server_;
  const std::shared_ptr<StateQuestions> questions_;
  std::atomic<int> num_readers_ = 0;
  mutable Mutex<LockRank::readers_by_message> mutex_;  // of all below
  mutable std::vector<Seen> seen_;                     // by rank
};

}  // namespace zx
