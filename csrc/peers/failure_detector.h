// Finds out which rank is gone when a wait for a rank fails, and tells the others.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "check.h"
#include "locks.h"
#include "peers/control_block.h"
#include "peers/last_seen.h"
#include "peers/long_waits.h"

namespace zx {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<c10d::Work>;

// Note [A rank that gives up says so]
// A rank waits for one other rank at a time. When a rank dies, only those that wait for it see its connection end. They
// raise, and the ranks that wait for *them* would wait until the timeout: a rank that has raised may live on, and if it
// exits, gloo does not always see it. (gloo stops reading a connection at a message for a receive that was dropped, so
// it never comes to the connection's end.)
//
// So a rank that gives up leaves a failure record in the store: the rank that it suspects, or the error that it raised
// itself. Then it says so in its control blocks (memory_messages.h) and closes its connections, which ends every wait
// for it. The ranks that are woken read its failure record, and so find the rank that all of them suspect. A rank whose
// connection ends without a failure record is the one that is gone.

constexpr int kUnknownRank = -1;

// Something on its way from or to rank `peer`; kUnknownRank if a collective moves it.
struct Awaited {
  Work work{};
  int peer = kUnknownRank;
};

// If the backend can, wakes a wait for it on another thread; never throws.
void abort_work(const Work& work);

// Of a gloo group: whoever waits for this rank there, or will, is told that it is gone.
void close_connections(const Group& group);

// Groups of ranks, and messages of theirs that were aborted. `for_questions`: in which ranks at their end still answer.
struct Connections {
  std::vector<Group> groups;
  std::vector<Group> for_questions{};
  std::vector<Work> aborted{};
};

// Any thread may call any of these. After the first failure every later one gets the same answer.
class FailureDetector {
 public:
  // `groups`: the gloo groups to be closed when this rank gives up. `store` is shared by the ranks; if it is null,
  // nothing is told and nothing is closed. `timeout` is that of the groups. `say_after`: see LongWait.
  FailureDetector(std::vector<Group> groups, c10::intrusive_ptr<c10d::Store> store, int rank, int world,
                  std::chrono::milliseconds timeout,
                  std::chrono::milliseconds say_after = std::chrono::milliseconds(0));

  // Sets the process of each rank on this machine, 0 for others.
  void set_processes(std::vector<int64_t> processes);

  std::vector<int64_t> processes() const;
  std::chrono::milliseconds timeout() const { return timeout_; }

  // One more group to be closed; by end() not if ranks at their end still answer there.
  void add_group(Group group, bool for_questions = false);
  // What others look into, to be told when this rank gives up.
  void add_control_block(std::shared_ptr<ControlBlock> control_block);

  // passed(): all ranks were at `sync_point`, in the current step. step_begun(): all have begun to update in step().
  void passed(const std::string& sync_point) { last_seen_.passed(sync_point); }
  void step_begun() { last_seen_.step_begun(); }

  // Runs `body`, which needs an answer from rank `peer`, and may take the LongWait. If it throws, this rank gives up,
  // and needing() throws std::runtime_error that names the rank that is gone.
  template <class Body>
  auto needing(int peer, const Body& body) {
    const auto start = Clock::now();
    try {
      LongWait wait(say_after_, [this, peer] { return waiting_for(peer); });
      if constexpr (std::is_invocable_v<Body, LongWait&>) {
        return body(wait);
      } else {
        return body();
      }
    } catch (const NeverComes& error) {
      leave(error.what());
      throw;
    } catch (const std::exception& error) {
      throw std::runtime_error(suspect(peer, Clock::now() - start, reason_of(error)));
    }
  }

  // The same, but this rank does not give up, since nobody else waits for what it reads there.
  template <class Body>
  auto reading(int peer, const Body& body) const {
    try {
      LongWait wait(say_after_, [this, peer] { return waiting_for(peer); });
      return body(wait);
    } catch (const std::exception& error) {
      throw std::runtime_error("zerox: rank " + std::to_string(peer) + " can't be read: " + reason_of(error));
    }
  }

  // Returns when `awaited`, a message of `group` from or to rank `peer`, is through. Throws as needing() does, or if
  // the wait was aborted here.
  void await(const Awaited& awaited, const Group& group, int peer);

  // Gives up because rank `peer` did not answer a call that lasted for `waited`. Returns a text that names the missing
  // rank.
  using Clock = std::chrono::steady_clock;
  std::string suspect(int peer, Clock::duration waited, const std::string& reason);

  // Says to the others that this rank waits for them at `where`, and in no call of zerox's; empty: not any more. See
  // Note [Two waits for each other].
  void stand_outside(const std::string& where);

  // Keeps a message that was aborted, with its memory, for as long as these connections are used. gloo reads no more
  // from a connection on which something arrives for a receive that is gone: whatever comes after it would never
  // arrive.
  void keep_aborted(const Work& work);

  // Gives up because of an error that this rank raised itself: the others raise `what` too, when they need this rank.
  void leave(const std::string& what);

  // The same at the end of this rank's script: what others read of it stays as it is.
  void end();

 private:
  WaitingFor waiting_for(int peer) const;
  std::string advice() const;
  void give_up(int suspected, bool late, const std::string& what, int64_t status = ControlBlock::kGaveUp);

  Connections connections_;
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int world_;
  std::chrono::milliseconds timeout_;
  std::chrono::milliseconds say_after_;
  mutable Mutex<LockRank::failure_detector> mutex_;  // of these three, and what is aborted
  std::vector<std::shared_ptr<ControlBlock>> control_blocks_;
  std::vector<int64_t> processes_;
  std::string conclusion_;  // empty until this rank gives up
  LastSeen last_seen_;
  std::atomic<int64_t> num_outside_{0};  // times that this rank stood outside
};

// A group and the FailureDetector of its ranks. Both are null for one rank alone. The group may have a part of the
// ranks only, as one axis of a mesh does: then `members` has the number of each of its ranks among all. Calls take
// ranks as the group numbers them.
struct Communicator {
  Group group{};
  std::shared_ptr<FailureDetector> failure_detector{};
  std::vector<int> members{};  // empty if the group has all ranks

  // See FailureDetector.
  template <class Body>
  auto needing(int peer, const Body& body) const {
    return failure_detector->needing(number_of(peer), body);
  }
  void await(const Awaited& awaited) const { failure_detector->await(awaited, group, number_of(awaited.peer)); }

 private:
  int number_of(int peer) const { return peer == kUnknownRank || members.empty() ? peer : members.at(peer); }
};

}  // namespace zx
