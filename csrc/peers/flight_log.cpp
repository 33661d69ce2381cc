#include "peers/flight_log.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "peers/poll.h"

namespace zx {
namespace {

constexpr const char* kAborted = "the exchange was aborted";

}  // namespace

FlightLog::FlightLog(Communicator comm, Neighbours neighbours, Tag tag)
    : comm_(std::move(comm)), neighbours_(std::move(neighbours)), tag_(tag), known_(comm_.group->getSize()) {}

FlightLog::~FlightLog() {
  for (auto& node : own_.nodes) ControlBlock::keep_for_others(std::move(node));
  ControlBlock::keep_for_others(std::move(control_block_));
}

int64_t FlightLog::begin(const std::vector<Messages>& sent) {
  const int world = comm_.group->getSize();
  size_t num_messages = 0;
  for (const Messages& each : sent) num_messages += each.size();
  auto node = std::make_shared<ControlBlock>(places + world + num_messages);
  size_t place = places + world;
  for (int rank = 0; rank < world; ++rank) {
    (*node)[places + rank] = static_cast<int64_t>(place);
    for (const at::Tensor& message : sent[rank]) {
      (*node)[place++] = reinterpret_cast<int64_t>(message.const_data_ptr());
    }
  }
  const std::lock_guard lock(mutex_);
  if (own_.num_begun == 0) tell_where_the_control_block_is();
  (own_.nodes.empty() ? (*control_block_)[first_node] : (*own_.nodes.back())[next]) =
      static_cast<int64_t>(node->address());
  own_.nodes.push_back(std::move(node));
  ++own_.num_begun;
  (*control_block_)[begun_again] = own_.num_begun;
  (*control_block_)[begun] = own_.num_begun;
  return own_.num_begun - 1;
}

// If this throws, no flight can begin: this rank has given up.
void FlightLog::tell_where_the_control_block_is() {
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
  if (neighbour.has_met) return;
  for (const Awaited* awaited : {&neighbour.received, &neighbour.sent}) {
    TORCH_CHECK(!stop, kAborted);
    comm_.await(*awaited);
  }
  neighbour.control_block = addresses_[1].const_data_ptr<int64_t>()[rank];
  neighbour.has_met = true;
}

std::vector<int64_t> FlightLog::find(int rank, int64_t flight, int64_t count, const Stop& stop) {
  exchange_addresses(rank, stop);
  std::vector<int64_t> found(count);
  const bool is_there = comm_.needing(rank, [&] {
    if (!poll_for(rank, [&] { return has_begun(rank, flight); }, stop)) return false;
    const int64_t node = node_of(rank, flight);
    const int64_t place = word_at(neighbours_, rank, node, places + comm_.group->getRank());
    neighbours_.read(rank, node + ControlBlock::offset_of(place), found.data(), count * sizeof(int64_t));
    return true;
  });
  TORCH_CHECK(is_there, kAborted);
  return found;
}

void FlightLog::check(int rank) const {
  comm_.needing(rank, [&] { check_read(neighbours_, rank, known_[rank].control_block); });
}

// Of a flight that the rank has begun, and this rank not let go.
int64_t FlightLog::node_of(int rank, int64_t flight) {
  const std::lock_guard lock(mutex_);
  const KnownNeighbour& neighbour = known_[rank];
  auto& nodes = known_[rank].nodes;
  if (nodes.empty()) nodes[0] = word_at(neighbours_, rank, neighbour.control_block, first_node);
  while (nodes.rbegin()->first < flight) {
    const auto [last, address] = *nodes.rbegin();
    nodes[last + 1] = word_at(neighbours_, rank, address, next);
  }
  return nodes.at(flight);
}

bool FlightsDone::add(int64_t flight) {
  if (flight < all_before || !others.insert(flight).second) return false;
  while (others.erase(all_before) != 0) ++all_before;
  return true;
}

void FlightLog::let_go(int64_t flight) {
  const std::lock_guard lock(mutex_);
  if (!let_go_.add(flight)) return;
  for (KnownNeighbour& neighbour : known_) {
    auto& nodes = neighbour.nodes;
    while (nodes.size() > 1 && nodes.begin()->first < let_go_.all_before) nodes.erase(nodes.begin());
  }
  to_mark_.insert(flight);
  while (!to_mark_.empty() && *to_mark_.begin() < let_go_.all_before + kMarks) {
    const int64_t next_marked = to_mark_.extract(to_mark_.begin()).value();
    (*control_block_)[marks + next_marked % kMarks] = next_marked + 1;
  }
}

void FlightLog::wait_for_readers(int64_t flight, const Stop& stop) {
  const int world = comm_.group->getSize();
  for (int distance = 1; distance < world; ++distance) {
    const int rank = (comm_.group->getRank() + distance) % world;
    if (!is_neighbour(rank)) continue;
    exchange_addresses(rank, stop);
    const bool is_over = comm_.needing(rank, [&] {
      try {
        return poll_for(rank, [&] { return has_let_go(rank, flight); }, stop);
      } catch (const GaveUp&) {  // it reads nothing any more
        return true;
      }
    });
    TORCH_CHECK(is_over, kAborted);
  }
  const std::lock_guard lock(mutex_);
  read_by_all_.add(flight);
  const auto first_kept = [&] { return own_.num_begun - static_cast<int64_t>(own_.nodes.size()); };
  while (first_kept() + 1 < read_by_all_.all_before) own_.nodes.pop_front();
}

void FlightLog::abort() {
  for (const KnownNeighbour& each : known_) {
    for (const Awaited& awaited : {each.received, each.sent}) {
      if (awaited.work) abort_work(awaited.work);
    }
  }
}

template <class Found>
bool FlightLog::poll_for(int rank, const Found& found, const Stop& stop) const {
  return poll(neighbours_, rank, known_[rank].control_block, *control_block_, *comm_.failure_detector, found,
              [&] { return stop.load(); });
}

bool FlightLog::has_begun(int rank, int64_t flight) const {
  std::array<int64_t, 2> both{};
  static_assert(begun_again == begun + 1);
  neighbours_.read(rank, known_[rank].control_block + ControlBlock::offset_of(begun), both.data(), sizeof(both));
  return both[0] > flight && both[0] == both[1];
}

bool FlightLog::has_let_go(int rank, int64_t flight) const {
  return word_at(neighbours_, rank, known_[rank].control_block, marks + flight % kMarks) > flight;
}

}  // namespace zx
