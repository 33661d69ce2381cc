#include "exchange/host_exchange.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>

#include "locks.h"
#include "torch_internals.h"

namespace zx {
namespace {

at::Tensor host_like(const at::Tensor& tensor) {
  // Only CUDA's copies need pinned memory to be asynchronous.
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(tensor.is_cuda()));
}

void wait_for_current_stream(c10::Device device) {
  check_may_wait("a device");
  const internals::Guard guard(device.type());
  guard.synchronizeStream(guard.getStream(device));
}

// Copies received slices from the host to the device once they have arrived.
class StagedPending final : public Pending {
 public:
  using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;  // each from the host to the device
  StagedPending(std::shared_ptr<Pending> on_host, at::Tensor sent, Copies copies)
      : Pending(Communicator{}),
        on_host_(std::move(on_host)),
        sent_(std::move(sent)),
        copies_(std::move(copies)),
        device_(copies_.front().second.device()) {}

  void wait() override {
    const internals::Guard guard(device_.type());
    const c10::Stream here = guard.getStream(device_);
    if (copied_) {
      copied_->block(here);
      return;
    }
    on_host_->wait();
    for (auto& [host, device] : copies_) device.copy_(host, /*non_blocking=*/true);
    copied_.emplace(device_.type());
    copied_->record(here);
    copies_.clear();
    sent_.reset();
  }
  void abort() override { on_host_->abort(); }

 private:
  std::shared_ptr<Pending> on_host_;
  at::Tensor sent_;  // in use until the wait is over
  Copies copies_;
  c10::Device device_;
  std::optional<c10::Event> copied_{};  // for other streams
};

class HostExchange final : public Exchange {
 public:
  explicit HostExchange(std::shared_ptr<Exchange> on_host) : Exchange(*on_host), on_host_(std::move(on_host)) {}

  std::vector<const Traffic*> traffic() const override { return on_host_->traffic(); }
  bool waits_on_host() const override { return true; }
  int64_t num_received() const override { return on_host_->num_received(); }
  bool takes_unequal() const override { return on_host_->takes_unequal(); }

  std::shared_ptr<Pending> scatter(const at::Tensor& flat, const at::Tensor& received,
                                   at::IntArrayRef starts) override {
    const at::Tensor host_flat = host_like(flat);
    const at::Tensor host_received = host_like(received);
    host_flat.copy_(flat, /*non_blocking=*/true);
    wait_for_current_stream(flat.device());
    auto pending = on_host_->scatter(host_flat, host_received, starts);
    return std::make_shared<StagedPending>(std::move(pending), host_flat,
                                           StagedPending::Copies{{host_received, received}});
  }

  std::vector<at::Tensor> to_sum(const at::Tensor& flat, const at::Tensor& received,
                                 at::IntArrayRef starts) const override {
    return on_host_->to_sum(flat, received, starts);
  }

  std::shared_ptr<Pending> gather(const at::Tensor& flat, at::IntArrayRef starts) override {
    const at::Tensor host_flat = host_like(flat);
    slice(host_flat, rank(), starts).copy_(slice(flat, rank(), starts), /*non_blocking=*/true);
    wait_for_current_stream(flat.device());
    auto pending = on_host_->gather(host_flat, starts);
    StagedPending::Copies copies;
    for (int peer = 0; peer < world(); ++peer) {
      if (peer != rank()) copies.emplace_back(slice(host_flat, peer, starts), slice(flat, peer, starts));
    }
    return std::make_shared<StagedPending>(std::move(pending), host_flat, std::move(copies));
  }

 private:
  std::shared_ptr<Exchange> on_host_;
};

}  // namespace

std::shared_ptr<Exchange> make_host_exchange(std::shared_ptr<Exchange> on_host) {
  return std::make_shared<HostExchange>(std::move(on_host));
}

}  // namespace zx
