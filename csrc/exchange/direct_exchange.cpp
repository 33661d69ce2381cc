#include "exchange/direct_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <exception>

#include "exchange/tags.h"

namespace zx {
namespace {

using Messages = Exchange::Messages;

// Where a neighbour's messages lie, once it has told this rank.
struct Offer {
  int64_t count = 0;
  at::Tensor addresses{};  // int64 [count]
  Awaited told{};          // gloo's works can be waited for only once
};

// Messages from and to some ranks, memory of others that this rank reads, and its own memory that others read.
class DirectPending : public Pending {
 public:
  DirectPending(Line line, const Neighbours& neighbours, Tag done)
      : Pending(std::move(line)), neighbours_(neighbours), done_(done), offers_(line_.group->getSize()) {}

  void send(at::Tensor message, int peer, Tag tag) { works_.push_back(start_send(std::move(message), peer, tag)); }

  void receive(at::Tensor into, int peer, Tag tag) { works_.push_back(start_receive(std::move(into), peer, tag)); }

  // Tells a neighbour where the messages lie.
  void offer(const Messages& messages, int peer, Tag tag) {
    at::Tensor addresses = at::empty({static_cast<int64_t>(messages.size())}, at::kLong);
    auto* next = addresses.mutable_data_ptr<int64_t>();
    for (const at::Tensor& message : messages) *next++ = reinterpret_cast<int64_t>(message.const_data_ptr());
    offered_.insert(offered_.end(), messages.begin(), messages.end());
    send(std::move(addresses), peer, tag);
    readers_.push_back(start_receive(at::empty({1}, at::kByte), peer, done_));
  }

  void expect_offer(int64_t count, int peer, Tag tag) {
    at::Tensor addresses = at::empty({count}, at::kLong);
    Awaited told = start_receive(addresses, peer, tag);
    offers_[peer] = {count, std::move(addresses), std::move(told)};
  }

  void wait() override {
    for (const Offer& offer : offers_) {
      if (offer.told.work) line_.await(offer.told);
    }
    Pending::wait();
  }

  void read(int rank, size_t message, int64_t start, const at::Tensor& into) override {
    const auto address = static_cast<uint64_t>(offers_[rank].addresses.const_data_ptr<int64_t>()[message]);
    line_.needing(rank, [&] {
      neighbours_.read(rank, address + start * into.element_size(), into.mutable_data_ptr(), into.nbytes());
    });
  }

  void let_go() override {
    for (size_t rank = 0; rank < offers_.size(); ++rank) {
      if (!offers_[rank].told.work) continue;
      try {
        const int peer = static_cast<int>(rank);
        std::vector<at::Tensor> messages{at::zeros({1}, at::kByte)};
        let_go_.push_back({line_.group->send(messages, peer, done_.number()), peer});
      } catch (const std::exception&) {  // the rank is gone, and waits for nothing
      }
    }
  }

  void wait_for_readers() override {
    for (const Awaited& each : let_go_) line_.await(each);
    for (const Awaited& each : readers_) line_.await(each);
    offered_.clear();
  }

  void abort() override {
    for (const Offer& offer : offers_) {
      if (offer.told.work) abort_one(offer.told.work);
    }
    for (const Awaited& each : readers_) abort_one(each.work);
    Pending::abort();
  }

 private:
  Awaited start_receive(at::Tensor into, int peer, Tag tag) {
    std::vector<at::Tensor> messages{std::move(into)};
    return {line_.needing(peer, [&] { return line_.group->recv(messages, peer, tag.number()); }), peer};
  }

  Awaited start_send(at::Tensor message, int peer, Tag tag) {
    std::vector<at::Tensor> messages{std::move(message)};
    return {line_.needing(peer, [&] { return line_.group->send(messages, peer, tag.number()); }), peer};
  }

  const Neighbours& neighbours_;
  Tag done_;
  std::vector<Offer> offers_;  // by rank
  Messages offered_;
  std::vector<Awaited> readers_;  // from those that read what is offered, when they are done
  std::vector<Awaited> let_go_;
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
        if (places_[rank].defined()) read(static_cast<int>(rank), 0, 0, places_[rank]);
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
  DirectExchange(Line line, Neighbours neighbours) : Exchange(std::move(line)), neighbours_(std::move(neighbours)) {}

  bool sends_messages() const override { return true; }

  bool reads(int rank) const override { return rank != this->rank() && neighbours_.has(rank); }

  int64_t num_received() const override {
    int64_t count = 0;
    for (int peer = 0; peer < world(); ++peer) count += peer != rank() && !reads(peer);
    return count;
  }

  std::shared_ptr<Pending> send(const std::vector<Messages>& sent, const std::vector<Messages>& received,
                                int64_t most) override {
    const auto count = static_cast<int64_t>(sent[rank()].size());  // as many as others send to this rank
    auto pending = std::make_shared<DirectPending>(line_, neighbours_, scatter_done_tags_.next());
    start(*pending, sent, received, count, scatter_tags_.next(most));
    return pending;
  }

  std::shared_ptr<Pending> scatter(const at::Tensor& flat, const at::Tensor& received) override {
    std::vector<Messages> sent(world());
    std::vector<Messages> expected(world());
    int64_t place = 0;
    for (int peer = 0; peer < world(); ++peer) {
      sent[peer] = {slice(flat, peer, world())};
      if (peer != rank() && !reads(peer)) expected[peer] = {slice(received, place++, num_received())};
    }
    return send(sent, expected, 1);
  }

  std::vector<at::Tensor> to_sum(const at::Tensor& flat, const at::Tensor& received) const override {
    std::vector<at::Tensor> slices;
    int64_t place = 0;
    for (int peer = 0; peer < world(); ++peer) {
      if (reads(peer)) {
        slices.emplace_back();
      } else {
        slices.push_back(peer == rank() ? slice(flat, peer, world()) : slice(received, place++, num_received()));
      }
    }
    return slices;
  }

  std::shared_ptr<Pending> gather(const at::Tensor& flat) override {
    std::vector<Messages> sent(world());
    std::vector<Messages> received(world());
    Messages places(world());
    for (int peer = 0; peer < world(); ++peer) {
      sent[peer] = {slice(flat, rank(), world())};
      received[peer] = {slice(flat, peer, world())};
      if (reads(peer)) places[peer] = received[peer][0];
    }
    auto pending = std::make_shared<GatherPending>(line_, neighbours_, gather_done_tags_.next());
    pending->set_places(std::move(places));
    start(*pending, sent, received, 1, gather_tags_.next());
    return pending;
  }

 private:
  // Messages to a peer have tags from `first` on. A neighbour gets a single message, which tells where they lie.
  // `count`: how many messages each of the other ranks has for this rank.
  void start(DirectPending& pending, const std::vector<Messages>& sent, const std::vector<Messages>& received,
             int64_t count, Tag first) {
    for (int step = 1; step < world(); ++step) {
      const int peer = (rank() + world() - step) % world();
      if (reads(peer)) {
        pending.expect_offer(count, peer, first);
        continue;
      }
      Tag tag = first;
      for (const at::Tensor& message : received[peer]) pending.receive(message, peer, tag++);
    }
    // Each rank starts with its right neighbour, so that no rank is everybody's first.
    for (int step = 1; step < world(); ++step) {
      const int peer = (rank() + step) % world();
      for (const at::Tensor& message : sent[peer]) count_sent(message);
      if (reads(peer)) {
        pending.offer(sent[peer], peer, first);
        continue;
      }
      Tag tag = first;
      for (const at::Tensor& message : sent[peer]) pending.send(message, peer, tag++);
    }
  }

  Neighbours neighbours_;
  Tags scatter_tags_{TagKind::scatter};
  Tags gather_tags_{TagKind::gather};
  Tags scatter_done_tags_{TagKind::scatter_done};
  Tags gather_done_tags_{TagKind::gather_done};
};

}  // namespace

std::shared_ptr<Exchange> make_direct_exchange(Line line, Neighbours neighbours) {
  return std::make_shared<DirectExchange>(std::move(line), std::move(neighbours));
}

}  // namespace zx
