// What ranks of one machine tell each other of flights: where their messages lie, and that nobody reads them any more.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "locks.h"
#include "peers/control_block.h"
#include "peers/failure_detector.h"
#include "peers/neighbours.h"
#include "peers/tags.h"

namespace zx {

// Note [Flights of neighbours are told in memory]
// Of each flight a rank tells its neighbours where the messages for them lie, and later that it has read theirs. Both
// stand in its own memory, as in Note [Ranks of one machine synchronize in memory], but nobody meets here: flights
// begin long before they are waited for, several are under way, and threads wait for them in any order.
//
// So each rank writes a log. A flight is a node of it, which has the addresses of its messages and, once there is one,
// that of the next node. In a control block stands how many flights have begun, and readers walk from node to node. A
// node is freed when all neighbours have let go of its flight and of the next one, to which they have walked past it.
//
// A rank that lets go of a flight leaves a mark in its own control block, in one of kMarks places that take turns.
// A mark also covers earlier flights of the same place, so it is written only after they are released.
//
// Only the control blocks' addresses are told by messages, in the first flight.

// What a rank knows of another one.
struct KnownNeighbour {
  Awaited sent{};      // to it, in the first flight: this rank's control block
  Awaited received{};  // from it: its own
  bool has_met = false;
  int64_t control_block = 0;
  std::map<int64_t, int64_t> nodes{};  // addresses by flight: those that are still to be read, and the last one
};

struct OwnFlights {
  int64_t num_begun = 0;
  std::deque<std::shared_ptr<ControlBlock>> nodes{};  // the last is that of the last flight
};

// Flights with which something is over, in any order.
struct FlightsDone {
  int64_t all_before = 0;
  std::set<int64_t> others{};
  // Returns false if it was among them already.
  bool add(int64_t flight);
};

// Of a communicator's neighbours, and for the flights of one kind, which begin in the same order on all ranks.
class FlightLog {
 public:
  // `tag`: of the first flight.
  FlightLog(Communicator comm, Neighbours neighbours, Tag tag);
  ~FlightLog();
  FlightLog(const FlightLog&) = delete;

  // The next flight has begun, with messages for each rank that is a neighbour. Returns its number. To be called by one
  // thread at a time; all others by any.
  using Messages = std::vector<at::Tensor>;
  int64_t begin(const std::vector<Messages>& sent);

  // Where the `count` messages of a rank for this one lie, once it has begun the flight. This, check() and
  // wait_for_readers() throw as FailureDetector::needing() does, and those with a `stop` also when that is set.
  using Stop = std::atomic<bool>;
  std::vector<int64_t> find(int rank, int64_t flight, int64_t count, const Stop& stop);
  // Throws if what was read of the rank is not to be trusted: it has given up, and its memory may be free.
  void check(int rank) const;
  // This rank reads nothing more of the flight.
  void let_go(int64_t flight);
  // Waits until no neighbour will read anything more of the flight.
  void wait_for_readers(int64_t flight, const Stop& stop);
  // Wakes those that wait for control blocks' addresses; never throws.
  void abort();

 private:
  // Of a control block. How many have begun stands there twice, the second one written first: who finds both the same
  // has not read half of one. A mark is a flight's number + 1.
  static constexpr int64_t kMarks = 1024;
  enum Word : size_t { begun = ControlBlock::first_free, begun_again, first_node, marks, num_words = marks + kMarks };
  // Of a node: where the next one is, and where in it the addresses of each rank's messages begin.
  enum NodeWord : size_t { next, places };

  bool is_neighbour(int rank) const { return rank != comm_.group->getRank() && neighbours_.has(rank); }
  void tell_where_the_control_block_is();
  void exchange_addresses(int rank, const Stop& stop);
  int64_t node_of(int rank, int64_t flight);
  bool has_begun(int rank, int64_t flight) const;
  bool has_let_go(int rank, int64_t flight) const;
  template <class Found>
  bool poll_for(int rank, const Found& found, const Stop& stop) const;

  Communicator comm_;
  Neighbours neighbours_;
  Tag tag_;
  std::shared_ptr<ControlBlock> control_block_ = std::make_shared<ControlBlock>(num_words);
  at::Tensor addresses_{};  // int64 [2, ranks]: of this rank's control block, once for each, and of theirs
  Mutex<LockRank::first_messages> first_messages_;  // of who waits for the first messages
  Mutex<LockRank::flight_log> mutex_;               // of all below
  std::vector<KnownNeighbour> known_;
  OwnFlights own_{};
  FlightsDone let_go_{};       // by this rank
  FlightsDone read_by_all_{};  // its own
  std::set<int64_t> to_mark_{};
};

}  // namespace zx
