// A process group's backend whose collectives run on a stream of their own, as NCCL's do, between ranks that are
// threads.
#pragma once

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>

#include "clocks.h"

namespace fake {

// The same memory as a CPU tensor.
inline at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU).requires_grad(false));
}

// The ranks' tensors of one collective; all wait for each other when they come and before they go.
class SyncPoint {
 public:
  explicit SyncPoint(int size) : size_(size), tensors_(static_cast<size_t>(size)) {}

  template <class Body>
  void meet(int rank, const at::Tensor& mine, const Body& body) {
    tensors_[static_cast<size_t>(rank)] = mine;
    arrive();
    body(tensors_);
    arrive();
  }

 private:
  void arrive() {
    std::unique_lock lock(mutex_);
    const uint64_t round = round_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++round_;
      all_here_.notify_all();
      return;
    }
    TORCH_CHECK(all_here_.wait_for(lock, std::chrono::seconds(30), [&] { return round != round_; }),
                "a rank did not come to the collective");
  }

  std::mutex mutex_;
  std::condition_variable all_here_;
  int size_;
  int arrived_ = 0;
  uint64_t round_ = 0;
  std::vector<at::Tensor> tensors_;
};

class StreamWork final : public c10d::Work {
 public:
  StreamWork(c10::Event done, c10::Device device) : done_(std::move(done)), device_(device) {}
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    done_.block(FakeGuard().getStream(device_));
    return true;
  }

 private:
  c10::Event done_;
  c10::Device device_;
};

class StreamBackend final : public c10d::Backend {
 public:
  StreamBackend(int rank, int size, std::shared_ptr<SyncPoint> sync_point)
      : Backend(rank, size),
        sync_point_(std::move(sync_point)),
        stream_(FakeGuard().getNewStream({kFake, static_cast<c10::DeviceIndex>(rank)}, 0)) {}

  const std::string getBackendName() const override { return "nccl"; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& /*options*/) override {
    return run(input, output, [&](const std::vector<at::Tensor>& all) {
      for (int peer = 0; peer < getSize(); ++peer) part(output, peer).copy_(on_host(all[static_cast<size_t>(peer)]));
    });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& /*options*/) override {
    return run(input, output, [&](const std::vector<at::Tensor>& all) {
      at::Tensor sum = part(all[0], getRank()).clone();
      for (int peer = 1; peer < getSize(); ++peer) sum.add_(part(all[static_cast<size_t>(peer)], getRank()));
      on_host(output).copy_(sum);
    });
  }
  // With counts, as csrc/exchange/exchange.cpp has them: all ranks send the same ones, or each as many to every rank.
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& received,
                                               std::vector<int64_t>& sent,
                                               const c10d::AllToAllOptions& /*options*/) override {
    const int64_t before = std::accumulate(sent.begin(), sent.begin() + (sent.empty() ? 0 : getRank()), int64_t{0});
    const bool is_as_many = std::all_of(sent.begin(), sent.end(), [&](int64_t count) { return count == sent[0]; });
    return run(input, output, [&](const std::vector<at::Tensor>& all) {
      int64_t place = 0;
      for (size_t peer = 0; peer < all.size(); ++peer) {
        if (received.empty()) {
          part(output, static_cast<int>(peer)).copy_(part(all[peer], getRank()));
          continue;
        }
        const int64_t start = is_as_many ? getRank() * received[peer] : before;
        on_host(output).narrow(0, place, received[peer]).copy_(on_host(all[peer]).narrow(0, start, received[peer]));
        place += received[peer];
      }
    });
  }

 private:
  at::Tensor part(const at::Tensor& flat, int index) const {
    const int64_t numel = flat.numel() / getSize();
    return on_host(flat).narrow(0, index * numel, numel);
  }

  template <class Body>
  c10::intrusive_ptr<c10d::Work> run(const at::Tensor& input, const at::Tensor& output, const Body& body) {
    const FakeGuard guard;
    c10::Event before(kFake);
    before.record(guard.getStream(stream_.device()));
    before.block(stream_);
    const c10::Stream old = guard.exchangeStream(stream_);
    access(input, /*write=*/false);
    access(output, /*write=*/true);
    sync_point_->meet(getRank(), input, body);
    guard.exchangeStream(old);
    c10::Event done(kFake);
    done.record(stream_);
    return c10::make_intrusive<StreamWork>(std::move(done), stream_.device());
  }

  std::shared_ptr<SyncPoint> sync_point_;
  c10::Stream stream_;
};

}  // namespace fake
