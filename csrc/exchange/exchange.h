// Reduce-scatter and all-gather over a ProcessGroup, in two ways.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "exchange/whereabouts.h"

namespace zx {

// Messages on the wire. Keeps its tensors alive; wait() throws as Whereabouts::await(). Some may
// stay in the memory of the rank that sends them, to be read from there: see Note [Neighbours].
class Pending {
 public:
  // `whereabouts`: of the ranks that are waited for; null where a subclass waits for others.
  explicit Pending(std::shared_ptr<Whereabouts> whereabouts, std::vector<Awaited> works = {})
      : whereabouts_(std::move(whereabouts)), works_(std::move(works)) {}
  virtual ~Pending() = default;
  virtual void wait();   // on the host, or where the backend works on streams, of the current stream
  virtual void abort();  // wakes a wait() on another thread, where the backend can; never throws

  // After the wait: elements of a rank's message from `start` on, for one that exchange.reads(rank).
  virtual void read(int rank, size_t message, int64_t start, const at::Tensor& into);
  // Nothing more will be read: their owners hear of it.
  virtual void let_go() {}
  // Waits until nobody will read what is here.
  virtual void wait_for_readers() {}

 protected:
  static void abort_one(const Work& work);

  std::shared_ptr<Whereabouts> whereabouts_;
  std::vector<Awaited> works_;  // unchanged once others may abort them
};

// What this rank sent to others, for accounts in closed form.
struct Traffic {
  std::atomic<int64_t> messages{0};
  std::atomic<int64_t> bytes{0};
};

// A flat buffer holds `world` slices of equal length; slice r belongs to rank r.
class Exchange {
 public:
  explicit Exchange(Line line);
  virtual ~Exchange() = default;
  Exchange& operator=(const Exchange&) = delete;

  // Whether ranks are there at all; a group may have a single one.
  bool has_group() const { return group_ != nullptr; }
  int rank() const { return rank_; }
  int world() const { return world_; }
  virtual const Traffic& traffic() const { return traffic_; }

  // Whether a call here, or a Pending's wait(), may block the host.
  virtual bool waits_on_host() const { return false; }

  // Whether send() is there: single messages, straight from and into where they lie.
  virtual bool sends_messages() const { return false; }

  // What is started returns what to wait for; null: nothing, as all has arrived.

  // Starts sending each message of `sent[r]` to rank r, and receiving `received[r]` from it. `most`: how many messages
  // any two ranks exchange at most; the same on all ranks.
  using Messages = std::vector<at::Tensor>;
  virtual std::shared_ptr<Pending> send(const std::vector<Messages>& sent, const std::vector<Messages>& received,
                                        int64_t most);

  // Whether a rank's messages are read from its memory, as many elements at a time as the reader likes: then
  // `received[r]` is ignored.
  virtual bool reads(int /*rank*/) const { return false; }

  // How many slices scatter() needs room for.
  virtual int64_t num_received() const = 0;

  // Starts moving every rank's slice of `flat` to its owner; this rank's arrive in `received`.
  virtual std::shared_ptr<Pending> scatter(const at::Tensor& flat, const at::Tensor& received) = 0;

  // After the wait: the slices whose sum is the reduced one, in rank order.
  virtual std::vector<at::Tensor> to_sum(const at::Tensor& flat, const at::Tensor& received) const = 0;

  // Starts sending this rank's slice of `flat` to all, receiving theirs in place.
  virtual std::shared_ptr<Pending> gather(const at::Tensor& flat) = 0;

 protected:
  Exchange(int rank, int world) : rank_(rank), world_(world) {}                          // without a group
  Exchange(const Exchange& other) : Exchange(Line{other.group_, other.whereabouts_}) {}  // the same ranks
  at::Tensor slice(const at::Tensor& flat, int64_t index, int64_t count) const;
  void count_sent(const at::Tensor& message);

  Group group_;
  std::shared_ptr<Whereabouts> whereabouts_;

 private:
  int rank_;
  int world_;
  Traffic traffic_;
};

// Ways to move slices.
//   direct  every rank sends each slice straight to its owner, which sums in rank order: the same bits whatever the
//           backend does. Over gloo as messages of its own, into place, launched at once (see direct_exchange.h); over
//           NCCL as one all-to-all.
//   native  the backend's own reduce_scatter_tensor and all_gather_into_tensor, which sum in the order that the backend
//           likes.
struct ExchangeKind {
  bool direct;
  bool messages;                    // the backend sends and receives one by one and into place (gloo); else all-to-all
  bool staged;                      // the tensors are an accelerator's, the backend's the host's: see staged_exchange.h
  std::vector<int64_t> neighbours;  // the process of each rank, or 0: see Note [Neighbours]; empty: none
};
// Of one rank alone where there is no group.
std::shared_ptr<Exchange> make_exchange(ExchangeKind kind, Line line);

}  // namespace zx
