#include "peers/flight_log.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "peers/poll.h"

namespace zx {
namespace {

constexpr const char* kAborted = "the exchange was aborted";

}  // namespace

FlightLog::FlightLog(Communicator comm, Neighbours neighbours, Tag tag)
    : comm_(std::move(comm)), neighbours_(std::move(neighbours)), tag_(tag), known_(comm_.group->getSize()) {
  add_ring({});
  control_block_ = rings_.front();
}

FlightLog::~FlightLog() {
  for (auto& ring : rings_) ControlBlock::keep_for_others(std::move(ring));
}

size_t FlightLog::word_of(const Ring& ring, int64_t flight, size_t word) const {
  return places + flight % ring.num_places * (addresses + known_.size()) + word;
}

OwnRing& FlightLog::ring_of(int64_t flight) {
  return **std::find_if(rings_.rbegin(), rings_.rend(),
                        [flight](const auto& ring) { return flight >= ring->told.first_flight; });
}

std::atomic<int64_t>& FlightLog::own(int64_t flight, size_t word) {
  OwnRing& ring = ring_of(flight);
  return ring[word_of(ring.told, flight, word)];
}

void FlightLog::add_ring(Ring ring) {
  auto made = std::make_shared<OwnRing>(word_of(ring, ring.num_places - 1, addresses + known_.size()), ring);
  if (!rings_.empty()) {
    OwnRing& last = *rings_.back();
    last[next] = static_cast<int64_t>(made->address());
    last[next_flight] = ring.first_flight;
    last[has_next] = 1;
  }
  rings_.push_back(std::move(made));
}

int64_t FlightLog::begin(const std::vector<Messages>& sent) {
  const std::lock_guard lock(mutex_);
  const int64_t flight = num_begun_;
  if (flight == 0) tell_where_the_ring_is();
  if (own(flight, begun) != own(flight, over_for_all)) add_ring({0, 2 * rings_.back()->told.num_places, flight});
  std::vector<int64_t>& found = rings_.back()->addresses[flight % rings_.back()->told.num_places];
  found.clear();
  for (const Messages& each : sent) {
    for (const at::Tensor& message : each) found.push_back(reinterpret_cast<int64_t>(message.const_data_ptr()));
  }
  const int64_t* first = found.data();
  for (size_t rank = 0; rank < sent.size(); first += sent[rank++].size()) {
    own(flight, addresses + rank) = reinterpret_cast<int64_t>(first);
  }
  own(flight, begun) = ++num_begun_;
  return flight;
}

// If this throws, no flight can begin: this rank has given up.
void FlightLog::tell_where_the_ring_is() {
  const int world = comm_.group->getSize();
  comm_.failure_detector->add_control_block(control_block_);
  addresses_ = at::zeros({2, world}, at::kLong);
  addresses_[0].fill_(static_cast<int64_t>(control_block_->address()));
  for (int rank = 0; rank < world; ++rank) {
    if (!is_neighbour(rank)) continue;
    std::vector<at::Tensor> to{addresses_[0].narrow(0, rank, 1)};
    std::vector<at::Tensor> from{addresses_[1].narrow(0, rank, 1)};
    comm_.needing(rank, [&] {
      known_[rank].received = {comm_.group->recv(from, rank, tag_.number()), rank};
      known_[rank].sent = {comm_.group->send(to, rank, tag_.number()), rank};
    });
  }
}

// An abort wakes one wait alone, so all flights that were aborted are asked for too.
void FlightLog::exchange_addresses(int rank, const Stop& stop) {
  const std::lock_guard lock(first_messages_);
  KnownNeighbour& neighbour = known_[rank];
  if (neighbour.control_block != 0) return;
  for (const Awaited* awaited : {&neighbour.received, &neighbour.sent}) {
    TORCH_CHECK(!stop, kAborted);
    comm_.await(*awaited);
  }
  neighbour.last_ring.address = neighbour.control_block = addresses_[1].const_data_ptr<int64_t>()[rank];
}

std::vector<int64_t> FlightLog::find(int rank, int64_t flight, int64_t count, const Stop& stop) {
  exchange_addresses(rank, stop);
  std::vector<int64_t> found(count);
  const bool is_there = comm_.needing(rank, [&] {
    const auto ring = await_in_place(rank, flight, begun, stop);
    if (!ring) return false;
    const size_t to_this_rank = word_of(*ring, flight, addresses + comm_.group->getRank());
    const int64_t first = word_at(neighbours_, rank, ring->address, to_this_rank);
    neighbours_.read(rank, first, found.data(), count * sizeof(int64_t));
    return true;
  });
  TORCH_CHECK(is_there, kAborted);
  return found;
}

void FlightLog::check(int rank) const {
  comm_.needing(rank, [&] { check_read(neighbours_, rank, known_[rank].control_block); });
}

void FlightLog::let_go(int64_t flight) {
  const std::lock_guard lock(mutex_);
  own(flight, over) = std::max(own(flight, over).load(), flight + 1);
}

void FlightLog::wait_for_readers(int64_t flight, const Stop& stop) {
  const int world = comm_.group->getSize();
  for (int distance = 1; distance < world; ++distance) {
    const int rank = (comm_.group->getRank() + distance) % world;
    if (!is_neighbour(rank)) continue;
    exchange_addresses(rank, stop);
    const bool is_over = comm_.needing(rank, [&] {
      try {
        return await_in_place(rank, flight, over, stop).has_value();
      } catch (const GaveUp&) {  // it reads nothing any more
        return true;
      }
    });
    TORCH_CHECK(is_over, kAborted);
  }
  const std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(own(flight, over) > flight);
  own(flight, over_for_all) = flight + 1;
}

void FlightLog::abort() {
  for (const KnownNeighbour& each : known_) {
    for (const Awaited& awaited : {each.received, each.sent}) {
      if (awaited.work) abort_work(awaited.work);
    }
  }
}

// The ring of a rank in which it says that it has begun a flight, or let go of it; none if it was stopped before.
std::optional<Ring> FlightLog::await_in_place(int rank, int64_t flight, PlaceWord what, const Stop& stop) {
  KnownNeighbour& neighbour = known_[rank];
  std::unique_lock lock(mutex_);
  Ring ring = neighbour.last_ring.first_flight <= flight ? neighbour.last_ring : Ring{neighbour.control_block};
  lock.unlock();
  const auto is_said = [&] {
    const int64_t said = word_at(neighbours_, rank, ring.address, word_of(ring, flight, what));
    if (what == begun ? said == flight + 1 : said > flight) return true;
    if (word_at(neighbours_, rank, ring.address, has_next) == 0) return false;
    const int64_t following = word_at(neighbours_, rank, ring.address, next_flight);
    if (following > flight) return false;
    ring = {static_cast<uint64_t>(word_at(neighbours_, rank, ring.address, next)), 2 * ring.num_places, following};
    return false;
  };
  const auto is_stopped = [&] { return stop.load(); };
  if (!poll(neighbours_, rank, neighbour.control_block, *control_block_, *comm_.failure_detector, is_said, is_stopped))
    return std::nullopt;
  lock.lock();
  if (ring.first_flight > neighbour.last_ring.first_flight) neighbour.last_ring = ring;
  return ring;
}

}  // namespace zx
