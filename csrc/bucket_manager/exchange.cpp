#include "bucket_manager/exchange.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "bucket_manager/tags.h"
#include "check.h"

namespace zx {

void Pending::wait() {
  for (const auto& work : works_) {
    // gloo's wait() says false, instead of throwing, when it was aborted.
    TORCH_CHECK(work->wait(), "the exchange was aborted");
  }
}

void Pending::abort() {
  for (const auto& work : works_) work->abort();
}

Exchange::Exchange(Group group) : group_(std::move(group)), rank_(group_->getRank()), world_(group_->getSize()) {}

at::Tensor Exchange::slice(const at::Tensor& flat, int64_t index, int64_t count) const {
  const int64_t numel = flat.numel() / count;
  return flat.narrow(0, index * numel, numel);
}

void Exchange::count_sent(const at::Tensor& message) {
  ++traffic_.messages;
  traffic_.bytes += static_cast<int64_t>(message.nbytes());
}

namespace {

class DirectExchange final : public Exchange {
 public:
  using Exchange::Exchange;

  int64_t num_received() const override { return world() - 1; }

  std::shared_ptr<Pending> scatter(const at::Tensor& flat, const at::Tensor& received) override {
    const int tag = scatter_tags_.next();
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int step = 1; step < world(); ++step) {
      const int peer = (rank() + world() - step) % world();
      receive(works, slice(received, place_of(peer), num_received()), peer, tag);
    }
    // Each rank starts with its right neighbour, so that no rank is everybody's first.
    for (int step = 1; step < world(); ++step) {
      const int peer = (rank() + step) % world();
      send(works, slice(flat, peer, world()), peer, tag);
    }
    return std::make_shared<Pending>(std::move(works));
  }

  std::vector<at::Tensor> to_sum(const at::Tensor& flat, const at::Tensor& received) const override {
    std::vector<at::Tensor> slices;
    for (int peer = 0; peer < world(); ++peer) {
      slices.push_back(peer == rank() ? slice(flat, peer, world()) : slice(received, place_of(peer), num_received()));
    }
    return slices;
  }

  std::shared_ptr<Pending> gather(const at::Tensor& flat) override {
    const int tag = gather_tags_.next();
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int step = 1; step < world(); ++step) {
      const int peer = (rank() + world() - step) % world();
      receive(works, slice(flat, peer, world()), peer, tag);
    }
    for (int step = 1; step < world(); ++step) {
      send(works, slice(flat, rank(), world()), (rank() + step) % world(), tag);
    }
    return std::make_shared<Pending>(std::move(works));
  }

 private:
  // Peers in rank order, without this one.
  int64_t place_of(int peer) const { return peer < rank() ? peer : peer - 1; }

  void receive(std::vector<c10::intrusive_ptr<c10d::Work>>& works, at::Tensor into, int peer, int tag) {
    std::vector<at::Tensor> message{std::move(into)};
    works.push_back(group_->recv(message, peer, tag));
  }

  void send(std::vector<c10::intrusive_ptr<c10d::Work>>& works, at::Tensor from, int peer, int tag) {
    count_sent(from);
    std::vector<at::Tensor> message{std::move(from)};
    works.push_back(group_->send(message, peer, tag));
  }

  Tags scatter_tags_{TagKind::scatter};
  Tags gather_tags_{TagKind::gather};
};

// The dispatcher's op names stay while the C++ methods are being renamed (_reduce_scatter_base became
// reduce_scatter_single between torch 2.11 and 2.13), so the collectives are called by name.
class NativeExchange final : public Exchange {
 public:
  using Exchange::Exchange;

  int64_t num_received() const override { return 1; }

  std::shared_ptr<Pending> scatter(const at::Tensor& flat, const at::Tensor& received) override {
    count_collective(flat);
    using Op = std::tuple<at::Tensor, c10::intrusive_ptr<c10d::Work>>(
        at::Tensor&, at::Tensor&, const c10::intrusive_ptr<c10d::ProcessGroup>&,
        const c10::intrusive_ptr<c10d::ReduceOp>&, bool, int64_t);
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("c10d::_reduce_scatter_base_", "").typed<Op>();
    at::Tensor output = received;
    at::Tensor input = flat;
    auto result = op.call(output, input, group_, c10::make_intrusive<c10d::ReduceOp>(c10d::ReduceOp::SUM), true, -1);
    return std::make_shared<Pending>(std::vector{std::get<1>(result)});
  }

  std::vector<at::Tensor> to_sum(const at::Tensor& /*flat*/, const at::Tensor& received) const override {
    return {received};
  }

  std::shared_ptr<Pending> gather(const at::Tensor& flat) override {
    count_collective(flat);
    using Op = std::tuple<at::Tensor, c10::intrusive_ptr<c10d::Work>>(
        at::Tensor&, at::Tensor&, const c10::intrusive_ptr<c10d::ProcessGroup>&, bool, int64_t);
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("c10d::_allgather_base_", "").typed<Op>();
    at::Tensor output = flat;
    at::Tensor input = slice(flat, rank(), world());
    auto result = op.call(output, input, group_, true, -1);
    return std::make_shared<Pending>(std::vector{std::get<1>(result)});
  }

 private:
  // A ring moves every slice but one through each rank.
  void count_collective(const at::Tensor& flat) {
    for (int step = 1; step < world(); ++step) count_sent(slice(flat, 0, world()));
  }
};

}  // namespace

std::shared_ptr<Exchange> make_exchange(const std::string& kind, Group group) {
  if (kind == "direct") return std::make_shared<DirectExchange>(std::move(group));
  TORCH_CHECK_VALUE(kind == "native", "exchange must be 'direct' or 'native', got '", kind, "'");
  return std::make_shared<NativeExchange>(std::move(group));
}

}  // namespace zx
