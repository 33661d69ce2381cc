#include "exchange/exchange.h"

#include <algorithm>

#include "exchange/alone_exchange.h"
#include "exchange/collectives.h"
#include "exchange/direct_exchange.h"
#include "exchange/host_exchange.h"
#include "torch_internals.h"

namespace zx {

void Pending::wait() {
  for (const Awaited& awaited : works_) comm_.await(awaited);
}

void Pending::abort() {
  for (const Awaited& awaited : works_) {
    abort_work(awaited.work);
    if (comm_.failure_detector) comm_.failure_detector->keep_aborted(awaited.work);
  }
}

void Pending::read(int /*rank*/, size_t /*message*/, int64_t /*start*/, const at::Tensor& /*into*/) {
  TORCH_INTERNAL_ASSERT(false, "this exchange reads nobody's memory");
}

namespace {
constexpr const char* kScattersNothing = "this exchange scatters nothing";
}

int64_t Exchange::num_received() const { TORCH_INTERNAL_ASSERT(false, kScattersNothing); }

std::shared_ptr<Pending> Exchange::scatter(const at::Tensor& /*flat*/, const at::Tensor& /*received*/,
                                           at::IntArrayRef /*starts*/) {
  TORCH_INTERNAL_ASSERT(false, kScattersNothing);
}

std::vector<at::Tensor> Exchange::to_sum(const at::Tensor& /*flat*/, const at::Tensor& /*received*/,
                                         at::IntArrayRef /*starts*/) const {
  TORCH_INTERNAL_ASSERT(false, kScattersNothing);
}

std::shared_ptr<Pending> Exchange::send(const std::vector<Messages>& /*sent*/,
                                        const std::vector<Messages>& /*received*/, int64_t /*most*/) {
  TORCH_INTERNAL_ASSERT(false, "this exchange sends no single messages");
}

Exchange::Exchange(Communicator comm)
    : comm_(std::move(comm)), rank_(comm_.group->getRank()), world_(comm_.group->getSize()) {}

at::Tensor Exchange::slice(const at::Tensor& flat, int rank, at::IntArrayRef starts) {
  return flat.narrow(0, starts[rank] - starts[0], starts[rank + 1] - starts[rank]);
}

at::Tensor Exchange::part(const at::Tensor& received, int64_t index, int64_t count) {
  const int64_t numel = received.numel() / count;
  return received.narrow(0, index * numel, numel);
}

void Exchange::count_sent(const at::Tensor& message) {
  ++traffic_.messages;
  traffic_.bytes += static_cast<int64_t>(message.nbytes());
}

namespace {

// Of slices that are equal, unless takes_unequal() is overridden: BucketManager::add_bucket() makes no others for it.
class CollectiveExchange : public Exchange {
 public:
  using Exchange::Exchange;

  std::shared_ptr<Pending> gather(const at::Tensor& flat, at::IntArrayRef starts) override {
    count_collective(flat);
    using Op = std::tuple<at::Tensor, c10::intrusive_ptr<c10d::Work>>(
        at::Tensor&, at::Tensor&, const c10::intrusive_ptr<c10d::ProcessGroup>&, bool, int64_t);
    static const auto op = internals::find_operator<Op>(internals::kAllGather);
    at::Tensor output = unknown_to_python(flat);
    at::Tensor input = unknown_to_python(slice(flat, rank(), starts));
    return started([&] { return std::get<1>(op.call(output, input, comm_.group, true, -1)); });
  }

 protected:
  template <class Call>
  std::shared_ptr<Pending> started(const Call& call) {
    Awaited everyone{comm_.needing(kUnknownRank, call)};
    return std::make_shared<Pending>(comm_, std::vector{std::move(everyone)});
  }

  // A ring, like an all-to-all, moves as many slices through each rank as there are other ranks.
  void count_collective(const at::Tensor& flat) {
    for (int step = 1; step < world(); ++step) count_sent(part(flat, 0, world()));
  }
};

class NativeExchange final : public CollectiveExchange {
 public:
  using CollectiveExchange::CollectiveExchange;

  int64_t num_received() const override { return 1; }

  std::shared_ptr<Pending> scatter(const at::Tensor& flat, const at::Tensor& received,
                                   at::IntArrayRef /*starts*/) override {
    count_collective(flat);
    using Op = std::tuple<at::Tensor, c10::intrusive_ptr<c10d::Work>>(
        at::Tensor&, at::Tensor&, const c10::intrusive_ptr<c10d::ProcessGroup>&,
        const c10::intrusive_ptr<c10d::ReduceOp>&, bool, int64_t);
    static const auto op = internals::find_operator<Op>(internals::kReduceScatter);
    at::Tensor output = received;
    at::Tensor input = flat;
    const auto sum = c10::make_intrusive<c10d::ReduceOp>(c10d::ReduceOp::SUM);
    return started([&] { return std::get<1>(op.call(output, input, comm_.group, sum, true, -1)); });
  }

  std::vector<at::Tensor> to_sum(const at::Tensor& /*flat*/, const at::Tensor& received,
                                 at::IntArrayRef /*starts*/) const override {
    return {received};
  }
};

// Keeps what is sent, which nobody else has, until it has left.
class PendingCopies final : public Pending {
 public:
  PendingCopies(std::shared_ptr<Pending> on_its_way, at::Tensor sent)
      : Pending(Communicator{}), on_its_way_(std::move(on_its_way)), sent_(std::move(sent)) {}

  void wait() override {
    on_its_way_->wait();
    // This stream comes after what has left; the one that the memory is of need not.
    if (sent_.defined() && !sent_.is_cpu()) sent_.record_stream(internals::current_stream(sent_.device()));
    sent_.reset();
  }
  void abort() override { on_its_way_->abort(); }

 private:
  std::shared_ptr<Pending> on_its_way_;
  at::Tensor sent_;
};

// NCCL pairs single messages by their order, and each costs a launch. So one all-to-all brings every slice to its
// owner, which sums as in the direct exchange. This rank's own slice is copied too.
class AllToAllExchange final : public CollectiveExchange {
 public:
  using CollectiveExchange::CollectiveExchange;

  int64_t num_received() const override { return world(); }

  bool takes_unequal() const override { return true; }

  std::shared_ptr<Pending> scatter(const at::Tensor& flat, const at::Tensor& received,
                                   at::IntArrayRef starts) override {
    for (int peer = 0; peer < world(); ++peer) {
      if (peer != rank()) count_sent(slice(flat, peer, starts));
    }
    const Counts counts = are_equal(starts) ? Counts{} : counts_of(starts);
    return exchanged(received, flat, counts.empty() ? Counts{} : Counts(counts.size(), counts[rank()]), counts);
  }

  // Of unequal slices: each rank sends its own to all by an all-to-all too, for which there are as many copies of it.
  std::shared_ptr<Pending> gather(const at::Tensor& flat, at::IntArrayRef starts) override {
    if (are_equal(starts)) return CollectiveExchange::gather(flat, starts);
    const at::Tensor own = slice(flat, rank(), starts);
    for (int step = 1; step < world(); ++step) count_sent(own);
    const Counts counts = counts_of(starts);
    const at::Tensor copies = own.repeat({world()});
    return std::make_shared<PendingCopies>(
        exchanged(unknown_to_python(flat), copies, counts, Counts(counts.size(), counts[rank()])), copies);
  }

  std::vector<at::Tensor> to_sum(const at::Tensor& /*flat*/, const at::Tensor& received,
                                 at::IntArrayRef /*starts*/) const override {
    std::vector<at::Tensor> slices;
    for (int peer = 0; peer < world(); ++peer) slices.push_back(part(received, peer, world()));
    return slices;
  }

 private:
  using Counts = std::vector<int64_t>;  // of elements, from or to each rank; empty: as many each

  static Counts counts_of(at::IntArrayRef starts) {
    Counts counts;
    for (size_t peer = 0; peer + 1 < starts.size(); ++peer) counts.push_back(starts[peer + 1] - starts[peer]);
    return counts;
  }

  static bool are_equal(at::IntArrayRef starts) {
    const Counts counts = counts_of(starts);
    return std::all_of(counts.begin(), counts.end(), [&](int64_t count) { return count == counts.front(); });
  }

  std::shared_ptr<Pending> exchanged(at::Tensor output, at::Tensor input, Counts received, Counts sent) {
    using Op = c10::intrusive_ptr<c10d::Work>(at::Tensor&, at::Tensor&, const c10::intrusive_ptr<c10d::ProcessGroup>&,
                                              std::vector<int64_t>, std::vector<int64_t>, bool, int64_t);
    static const auto op = internals::find_operator<Op>(internals::kAllToAll);
    return started([&] { return op.call(output, input, comm_.group, received, sent, true, -1); });
  }
};

}  // namespace

std::shared_ptr<Exchange> make_exchange(ExchangeKind kind, Communicator comm) {
  if (!comm.group) return make_alone_exchange();
  std::shared_ptr<Exchange> made;
  if (!kind.direct) {
    made = std::make_shared<NativeExchange>(std::move(comm));
  } else if (kind.single_messages) {
    made = make_direct_exchange(std::move(comm), Neighbours(std::move(kind.neighbours)));
  } else {
    made = std::make_shared<AllToAllExchange>(std::move(comm));
  }
  return kind.via_host ? make_host_exchange(std::move(made)) : made;
}

}  // namespace zx
