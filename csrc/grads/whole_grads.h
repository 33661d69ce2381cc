// Gradients that are whole when step() comes (ZeRO stage 1). The update takes this rank's part of p.grad, so that the
// user's changes to it count.
#pragma once

#include <atomic>

#include "grads/mean_grads.h"

namespace zx {

// p.grad is the mean, as it is.
class WholeGrads : public MeanGrads {
 public:
  using MeanGrads::MeanGrads;

  bool sends() const override { return false; }
  Taken take(const Bucket& bucket, Slot& slot, const at::Tensor& local, const Locked& lock) override;
  void scale(int64_t bucket, const at::Tensor& factor, const Slots& slots) override;
  GradsSeen look(int64_t rounds, const Locked& lock) override;

  // Packed from p.grad anew at each call.
  at::Tensor shard(int64_t bucket) override;
  std::vector<at::Tensor> shard_by_part(int64_t bucket) override;

 protected:
  // Whether p.grad of this slot has to be sent before the update.
  virtual bool is_unsent(const Slot& /*slot*/, int64_t /*rounds*/) const { return false; }

 private:
  bool zeros_are_in_grad() const override { return true; }
  std::vector<at::Tensor> pack(Bucket& bucket, int64_t num_zero_copy);
};

// Note [A mean that is sent again]
// If p.grad is not zeroed after a backward, it holds the mean, and the next backward adds to it. What is sent then is
// both. The ranks' equal means add up to W times as much, and divided by W they are what they were. Where sums are
// divided by another number (gradient_divisor), they are not: so p.grad is first multiplied by divisor / W. That is
// done in place where backward adds to it (`is_undone`), else to a copy that is sent.

// p.grad is the mean once backward has ended: it is reduced to shards, and gathered from them.
class GatheredGrads final : public WholeGrads {
 public:
  using WholeGrads::WholeGrads;

  bool sends() const override { return true; }
  bool may_be_unseen(const Slot& slot) const override {
    const at::Tensor& grad = slot.param.grad();
    return grad.defined() && !slot.whole.mean.is_still(grad);
  }
  bool syncs_after_backward() const override { return true; }
  bool leaves_in_place() const override { return true; }
  bool precedes_accumulation(const Bucket& bucket) const override { return undoing(bucket) != 1.0; }
  void before_accumulate(const Bucket& bucket, Slot& slot, const Locked& lock) override;
  void accumulated(Slot& slot, bool sync, const Locked& lock) override;
  Taken take(const Bucket& bucket, Slot& slot, const at::Tensor& local, const Locked& lock) override;
  void complete(int64_t rounds, double scale, Agreement& agreement) override;
  void set_rests(bool rests) override { rests_ = rests; }
  bool has_lost_mean() const override { return has_lost_mean_; }
  void forget_old(int64_t rounds) override { zero(/*set_to_none=*/true, rounds); }
  void send_rest(Agreement& agreement, const std::function<void()>& launch) override;
  void start_over(bool is_step) override;

 private:
  bool is_unsent(const Slot& slot, int64_t rounds) const override;
  // See Note [A mean that is sent again].
  double undoing(const Bucket& bucket) const {
    return bucket.reduced.divisor / static_cast<double>(bucket.subgroup.world);
  }
  std::vector<uint8_t> who_has_grads();
  std::vector<at::Tensor> gather_means(double scale);

  int64_t gathered_ = 0;      // rounds whose mean is in p.grad
  bool only_unsent_ = false;  // this round sends only gradients that no flight took
  std::atomic<bool> rests_ = false;
  std::atomic<bool> has_lost_mean_ = false;  // since ranks synchronized where something was sent
};

}  // namespace zx
