// Which rank is gone where a wait for one fails, and word of it to the others.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"

namespace zx {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<c10d::Work>;

// Note [A rank that gives up says so]
// A rank waits for one other rank at a time. When a rank dies, only those that wait for it see its connection end. They
// raise, and the ranks that wait for *them* would wait until the timeout: a rank that has raised may live on, and where
// it exits gloo does not always see it. (gloo stops reading a connection at a message for a receive that was dropped,
// so it never comes to the connection's end.)
//
// So a rank that gives up leaves a word in the store: whom it missed, or what it raised itself. Then it closes its
// connections, which ends every wait for it. The ranks that are woken read its word, and so find out whom all of them
// miss. A rank whose connection ends without a word is the one that is gone.

constexpr int kUnknownRank = -1;

// Something on its way from or to rank `peer`, or where a collective moves it, from nobody in particular.
struct Awaited {
  Work work{};
  int peer = kUnknownRank;
};

// Any thread may call any of these. After the first failure every later one gets the same answer.
class Whereabouts {
 public:
  // `groups`: gloo's, to be closed when this rank gives up. `store`: shared by the ranks; if null, nothing is told and
  // nothing closed. `timeout`: the groups' own.
  Whereabouts(std::vector<Group> groups, c10::intrusive_ptr<c10d::Store> store, int rank, int world,
              std::chrono::milliseconds timeout);

  // The process of each rank on this machine, 0 for others.
  void set_processes(std::vector<int64_t> processes);

  // All ranks were in `place`, in the current step; and all have begun to update in step().
  void met(const char* place);
  void step_begun();

  // Runs `body`, which needs an answer from rank `peer`. If it throws, this rank gives up: throws std::runtime_error
  // that names the rank that is gone.
  template <class Body>
  auto needing(int peer, const Body& body) {
    const auto start = Clock::now();
    try {
      return body();
    } catch (const std::exception& error) {
      throw std::runtime_error(miss(peer, Clock::now() - start, reason_of(error)));
    }
  }

  // Returns when it is through. Throws as needing(), or if the wait was aborted here.
  void await(const Awaited& awaited);

  // Gives up because rank `peer` did not answer a call that lasted so long. Returns who is gone.
  using Clock = std::chrono::steady_clock;
  std::string miss(int peer, Clock::duration waited, const std::string& reason);

  // Gives up because of what this rank raised itself: the others raise `what` too, where they need this rank.
  void leave(const std::string& what);

 private:
  void give_up(int missed, bool late, const std::string& what);
  void close_connections();

  std::vector<Group> groups_;
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int world_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;  // of all below
  std::vector<int64_t> processes_;
  const char* place_ = nullptr;  // where all ranks were together last; null: nowhere yet
  int64_t seen_in_step_ = 0;
  int64_t step_ = 1;
  std::string verdict_;  // empty until this rank gives up
};

// A group, and what is known of its ranks. Both null for one rank alone.
struct Line {
  Group group{};
  std::shared_ptr<Whereabouts> whereabouts{};
};

}  // namespace zx
