// What ranks of one machine tell each other of flights: where their messages lie, and that nobody reads them any more.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
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
// So each rank has a ring of places, in which its flights take turns. In a place stands the flight's number, where the
// addresses of its messages are, and whether this rank has let go of the others'. Neighbours read it without a lock.
// The number is written last, and a reader waits for this very one: a torn one cannot match. A flight takes a place
// when all have let go of the one before it there, so what a reader has found stays until it lets go itself. Another
// rank may have yet to see that this one let go of the flight before: it waits for that flight's mark or a later one.
//
// No flight may wait for a place, so a rank that finds none goes on in a ring of twice as many. The flights in the air
// are those of the optimizer's buckets: rings are added in the first step, and when buckets are.
//
// Only the first rings' addresses are told by messages, in the first flight. These are also the ranks' control blocks.
// A ring has the address of the next one.

struct Ring {
  uint64_t address = 0;
  int64_t num_places = 64;
  int64_t first_flight = 0;  // those before have places in rings before
};

// A ring of this rank.
struct OwnRing : ControlBlock {
  OwnRing(size_t num_words, Ring ring) : ControlBlock(num_words), told(ring), addresses(ring.num_places) {
    told.address = address();
  }
  Ring told;
  std::vector<std::vector<int64_t>> addresses;  // of messages, by place
};

// What a rank knows of another one.
struct KnownNeighbour {
  Awaited sent{};              // to it, in the first flight: where this rank's first ring is
  Awaited received{};          // from it: where its own is
  uint64_t control_block = 0;  // 0 until these have come
  Ring last_ring{};            // that is known
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
  // Waits until no neighbour will read anything more of the flight, of which this rank has let go.
  void wait_for_readers(int64_t flight, const Stop& stop);
  // Wakes those that wait for control blocks' addresses; never throws.
  void abort();

 private:
  // Of a ring: where the next one is, and its first flight, once has_next is 1.
  enum Word : size_t { has_next = ControlBlock::first_free, next, next_flight, places };
  // Of a place: the number + 1 of its flight, and of the last one there that this rank has let go of, and that all
  // have; where the addresses of each rank's messages begin.
  enum PlaceWord : size_t { begun, over, over_for_all, addresses };

  bool is_neighbour(int rank) const { return rank != comm_.group->getRank() && neighbours_.has(rank); }
  size_t word_of(const Ring& ring, int64_t flight, size_t word) const;
  OwnRing& ring_of(int64_t flight);
  std::atomic<int64_t>& own(int64_t flight, size_t word);
  void add_ring(Ring ring);
  void tell_where_the_ring_is();
  void exchange_addresses(int rank, const Stop& stop);
  std::optional<Ring> await_in_place(int rank, int64_t flight, PlaceWord what, const Stop& stop);

  Communicator comm_;
  Neighbours neighbours_;
  Tag tag_;
  at::Tensor addresses_{};  // int64 [2, ranks]: of this rank's first ring, once for each, and of theirs
  Mutex<LockRank::first_messages> first_messages_;  // of who waits for the first messages
  std::shared_ptr<ControlBlock> control_block_;
  Mutex<LockRank::flight_log> mutex_;  // of all below
  std::vector<KnownNeighbour> known_;
  int64_t num_begun_ = 0;
  std::vector<std::shared_ptr<OwnRing>> rings_;  // the last one has places for new flights
};

}  // namespace zx
