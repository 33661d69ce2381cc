// Reduce-scatter and all-gather over a ProcessGroup: the face that every way of doing it has.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <memory>
#include <string>
#include <vector>

#include "peers/failure_detector.h"
#include "peers/traffic.h"

namespace zx {

// Messages on the wire. A Pending keeps their tensors alive, and wait() throws as FailureDetector::await() does. Some
// messages may stay in the memory of the rank that sends them, to be read from there: see Note [Neighbours].
class Pending {
 public:
  // `comm` is to the ranks that are waited for; empty if a subclass does the waiting in another way.
  explicit Pending(Communicator comm, std::vector<Awaited> works = {})
      : comm_(std::move(comm)), works_(std::move(works)) {}
  virtual ~Pending() = default;
  virtual void wait();   // blocks the host or, if the backend works on streams, the current stream
  virtual void abort();  // if the backend can, wakes a wait() on another thread; never throws

  // After the wait: reads elements of a rank's message, from `start` on. Only for a rank that exchange.reads().
  virtual void read(int rank, size_t message, int64_t start, const at::Tensor& into);
  // Tells the owners of such messages that this rank will read nothing more.
  virtual void let_go() {}
  // Waits until no other rank will read this rank's memory.
  virtual void wait_for_readers() {}

 protected:
  Communicator comm_;
  std::vector<Awaited> works_;  // unchanged once others may abort them
};

// A flat buffer holds `world` slices, of which slice r belongs to rank r. `starts` says where each one begins, and
// where the last one ends: counted from the first, so that a part of such a list is one of a part of the buffer.
class Exchange {
 public:
  explicit Exchange(Communicator comm);
  virtual ~Exchange() = default;
  Exchange& operator=(const Exchange&) = delete;

  // Whether there is a group at all; a group may have a single rank.
  bool has_group() const { return comm_.group != nullptr; }
  int rank() const { return rank_; }
  int world() const { return world_; }
  // Over each axis of the ranks' mesh, the inner one first.
  virtual std::vector<const Traffic*> traffic() const { return {&traffic_}; }
  const Communicator& comm() const { return comm_; }

  // Whether a call here, or a Pending's wait(), may block the host.
  virtual bool waits_on_host() const { return false; }

  // Whether send() is supported: single messages, sent from and received into the places where they lie.
  virtual bool sends_messages() const { return false; }

  // Whether slices may differ in length: then another rank's is not as long as this one's.
  virtual bool takes_unequal() const { return false; }

  // Functions that start something return what to wait for; null if everything has arrived already.

  // Starts sending each message of `sent[r]` to rank r, and receiving `received[r]` from it. `most`, the same on all
  // ranks: the largest number of messages from any rank to another.
  using Messages = std::vector<at::Tensor>;
  virtual std::shared_ptr<Pending> send(const std::vector<Messages>& sent, const std::vector<Messages>& received,
                                        int64_t most);

  // Whether a rank's messages are read from its memory, as many elements at a time as the reader likes. If so,
  // `received[r]` is ignored.
  virtual bool reads(int /*rank*/) const { return false; }

  // How many slices scatter() needs room for.
  virtual int64_t num_received() const;

  // Starts moving every rank's slice of `flat` to its owner. This rank's slices arrive in `received`.
  virtual std::shared_ptr<Pending> scatter(const at::Tensor& flat, const at::Tensor& received, at::IntArrayRef starts);

  // After the wait: the slices whose sum is the reduced slice, in rank order; undefined for a rank whose slice is to be
  // read.
  virtual std::vector<at::Tensor> to_sum(const at::Tensor& flat, const at::Tensor& received,
                                         at::IntArrayRef starts) const;

  // Starts sending this rank's slice of `flat` to all others, and receiving theirs in place.
  virtual std::shared_ptr<Pending> gather(const at::Tensor& flat, at::IntArrayRef starts) = 0;

 protected:
  Exchange(int rank, int world) : rank_(rank), world_(world) {}  // without a group
  Exchange(Communicator comm, int rank, int world) : comm_(std::move(comm)), rank_(rank), world_(world) {}
  Exchange(const Exchange& other) : Exchange(Communicator(other.comm_)) {}  // the same ranks
  static at::Tensor slice(const at::Tensor& flat, int rank, at::IntArrayRef starts);
  // One of `count` slices that came to one rank, which are equal.
  static at::Tensor part(const at::Tensor& received, int64_t index, int64_t count);
  void count_sent(const at::Tensor& message);

  Communicator comm_;

 private:
  int rank_;
  int world_;
  Traffic traffic_;
};

// Ways to move slices.
//   direct  every rank sends each slice directly to its owner, which sums in rank order, so that the bits are the same
//           whatever the backend does. Over gloo the slices are single messages, into place, all launched at once (see
//           direct_exchange.h); over NCCL they are one all-to-all.
//   native  the backend's own reduce_scatter_tensor and all_gather_into_tensor, which sum in the order that the backend
//           likes.
struct ExchangeKind {
  bool direct;
  bool single_messages;             // whether the backend sends single messages into place (gloo); if not, all-to-all
  bool via_host;                    // accelerator tensors over a backend for host memory: see host_exchange.h
  std::vector<int64_t> neighbours;  // the process of each rank, or 0; empty if there are none: see Note [Neighbours]
};
// Without a group, makes the exchange of one rank alone.
std::shared_ptr<Exchange> make_exchange(ExchangeKind kind, Communicator comm);

// By subgroup: see Note [Subgroups] in buckets/bucket.h.
using Exchanges = std::vector<std::shared_ptr<Exchange>>;

}  // namespace zx
