#include "exchange/direct_exchange.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "peers/flight_log.h"
#include "peers/tags.h"

namespace zx {
namespace {

using Messages = Exchange::Messages;

// Messages from and to some ranks, and memory of others that this rank reads while they read its own.
class DirectPending : public Pending {
 public:
  // `log`: of what neighbours read; null if there are none.
  DirectPending(Communicator comm, const Neighbours& neighbours, std::shared_ptr<FlightLog> log)
      : Pending(std::move(comm)), neighbours_(neighbours), log_(std::move(log)), addresses_(comm_.group->getSize()) {}

  void send(at::Tensor message, int peer, Tag tag) {
    std::vector<at::Tensor> messages{std::move(message)};
    works_.push_back({comm_.needing(peer, [&] { return comm_.group->send(messages, peer, tag.number()); }), peer});
  }

  void receive(at::Tensor into, int peer, Tag tag) {
    std::vector<at::Tensor> messages{std::move(into)};
    works_.push_back({comm_.needing(peer, [&] { return comm_.group->recv(messages, peer, tag.number()); }), peer});
  }

  // Tells neighbours where the messages for them lie; each of them has `count` for this rank.
  void offer(std::vector<Messages> messages, int64_t count) {
    offered_ = std::move(messages);
    count_ = count;
    flight_ = log_->begin(offered_);
  }

  void wait() override {
    for (int rank = 0; rank < static_cast<int>(addresses_.size()); ++rank) {
      if (flight_ >= 0 && rank != comm_.group->getRank() && neighbours_.has(rank)) {
        addresses_[rank] = log_->find(rank, flight_, count_, aborted_);
      }
    }
    Pending::wait();
  }

  void read(int rank, size_t message, int64_t start, const at::Tensor& into) override {
    const auto address = static_cast<uint64_t>(addresses_[rank].at(message));
    comm_.needing(rank, [&] {
      neighbours_.read(rank, address + start * into.element_size(), into.mutable_data_ptr(), into.nbytes());
    });
  }

  // That what was read of a rank is what it had.
  void check(int rank) const { log_->check(rank); }

  void let_go() override {
    if (flight_ >= 0) log_->let_go(flight_);
  }

  void wait_for_readers() override {
    if (flight_ >= 0) log_->wait_for_readers(flight_, aborted_);
    offered_.clear();
  }

  void abort() override {
    aborted_ = true;
    if (log_) log_->abort();
    Pending::abort();
  }

 private:
  const Neighbours& neighbours_;
  std::shared_ptr<FlightLog> log_;
  int64_t flight_ = -1;                          // until it is begun
  int64_t count_ = 0;                            // of each neighbour's messages
  std::vector<std::vector<int64_t>> addresses_;  // of them, by rank
  std::vector<Messages> offered_{};              // kept for those who read them
  FlightLog::Stop aborted_ = false;
};

// Slices that arrive in their places in a flat buffer.
class GatherPending final : public DirectPending {
 public:
  using DirectPending::DirectPending;

  void set_places(Messages places) { places_ = std::move(places); }

  void wait() override {
    try {
      DirectPending::wait();
      for (size_t rank = 0; rank < places_.size(); ++rank) {
        if (!places_[rank].defined()) continue;
        read(static_cast<int>(rank), 0, 0, places_[rank]);
        check(static_cast<int>(rank));
      }
    } catch (...) {
      let_go();
      throw;
    }
    let_go();
  }

 private:
  Messages places_;  // by rank; undefined where nothing is read
};

class DirectExchange final : public Exchange {
 public:
  DirectExchange(Communicator comm, Neighbours neighbours)
      : Exchange(std::move(comm)), neighbours_(std::move(neighbours)) {
    if (num_received() == world() - 1) return;  // by message, from all
    scatter_log_ = std::make_shared<FlightLog>(comm_, neighbours_, Tag(TagKind::scatter_log, 0));
    gather_log_ = std::make_shared<FlightLog>(comm_, neighbours_, Tag(TagKind::gather_log, 0));
  }

  bool sends_messages() const override { return true; }
  bool takes_unequal() const override { return true; }

  bool reads(int rank) const override { return rank != this->rank() && neighbours_.has(rank); }

  int64_t num_received() const override {
    int64_t count = 0;
    for (int peer = 0; peer < world(); ++peer) count += peer != rank() && !reads(peer);
    return count;
  }

  std::shared_ptr<Pending> send(const std::vector<Messages>& sent, const std::vector<Messages>& received,
                                int64_t most) override {
    const auto count = static_cast<int64_t>(sent[rank()].size());  // as many as others send to this rank
    auto pending = std::make_shared<DirectPending>(comm_, neighbours_, scatter_log_);
    start(*pending, sent, received, count, scatter_tags_.next(most));
    return pending;
  }

  std::shared_ptr<Pending> scatter(const at::Tensor& flat, const at::Tensor& received,
                                   at::IntArrayRef starts) override {
    std::vector<Messages> sent(world());
    std::vector<Messages> expected(world());
    int64_t place = 0;
    for (int peer = 0; peer < world(); ++peer) {
      sent[peer] = {slice(flat, peer, starts)};
      if (peer != rank() && !reads(peer)) expected[peer] = {part(received, place++, num_received())};
    }
    return send(sent, expected, 1);
  }

  std::vector<at::Tensor> to_sum(const at::Tensor& flat, const at::Tensor& received,
                                 at::IntArrayRef starts) const override {
    std::vector<at::Tensor> slices;
    int64_t place = 0;
    for (int peer = 0; peer < world(); ++peer) {
      if (reads(peer)) {
        slices.emplace_back();
      } else {
        slices.push_back(peer == rank() ? slice(flat, peer, starts) : part(received, place++, num_received()));
      }
    }
    return slices;
  }

  std::shared_ptr<Pending> gather(const at::Tensor& flat, at::IntArrayRef starts) override {
    std::vector<Messages> sent(world());
    std::vector<Messages> received(world());
    Messages places(world());
    for (int peer = 0; peer < world(); ++peer) {
      sent[peer] = {slice(flat, rank(), starts)};
      received[peer] = {slice(flat, peer, starts)};
      if (reads(peer)) places[peer] = received[peer][0];
    }
    auto pending = std::make_shared<GatherPending>(comm_, neighbours_, gather_log_);
    pending->set_places(std::move(places));
    start(*pending, sent, received, 1, gather_tags_.next());
    return pending;
  }

 private:
  // Messages to a peer have tags from `first` on. A neighbour gets none, and is told where they lie. `count`: how many
  // messages each of the other ranks has for this rank.
  void start(DirectPending& pending, const std::vector<Messages>& sent, const std::vector<Messages>& received,
             int64_t count, Tag first) {
    for (int step = 1; step < world(); ++step) {
      const int peer = (rank() + world() - step) % world();
      if (reads(peer)) continue;
      Tag tag = first;
      for (const at::Tensor& message : received[peer]) pending.receive(message, peer, tag++);
    }
    std::vector<Messages> offered(world());
    // Each rank starts with its right neighbour, so that no rank is everybody's first.
    for (int step = 1; step < world(); ++step) {
      const int peer = (rank() + step) % world();
      for (const at::Tensor& message : sent[peer]) count_sent(message);
      if (reads(peer)) {
        offered[peer] = sent[peer];
        continue;
      }
      Tag tag = first;
      for (const at::Tensor& message : sent[peer]) pending.send(message, peer, tag++);
    }
    if (num_received() < world() - 1) pending.offer(std::move(offered), count);
  }

  Neighbours neighbours_;
  Tags scatter_tags_{TagKind::scatter};
  Tags gather_tags_{TagKind::gather};
  // Null without neighbours.
  std::shared_ptr<FlightLog> scatter_log_{};
  std::shared_ptr<FlightLog> gather_log_{};
};

}  // namespace

std::shared_ptr<Exchange> make_direct_exchange(Communicator comm, Neighbours neighbours) {
  return std::make_shared<DirectExchange>(std::move(comm), std::move(neighbours));
}

}  // namespace zx
