// Where autograd is watched: the hooks of parameters, and whose hooks are there too.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "buckets/buckets.h"
#include "grads/mean_grads.h"
#include "torch_internals.h"

namespace zx {

class GradHooks {
 public:
  // Is called on autograd's threads. Hooks hold it weakly, since the graph may outlive the optimizer; it has these
  // GradHooks.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void before_accumulate(const Bucket& bucket, Slot& slot) = 0;
    virtual void after_accumulate(Bucket& bucket, Slot& slot) = 0;
  };

  GradHooks(std::shared_ptr<Buckets> buckets, std::shared_ptr<MeanGrads> grads)
      : buckets_(std::move(buckets)), grads_(std::move(grads)) {}

  // Of a bucket that is new. The same listener each time.
  void install(Bucket& bucket, std::weak_ptr<Listener> listener);
  static void remove(Slot& slot);

  // To be called when no backward is running: see Note [Hooks follow the parameter]. Returns why what p.grad holds
  // can't be told; empty if it can.
  std::string restore_watches();

  // See Note [Other reducers].
  void refuse_other_reducers() const;
  // Whether the graph task that this thread is in computes gradients for p.grad of any slot, or of everything. Not for
  // torch.autograd.grad().
  bool is_about_to_accumulate() const;

 private:
  void hang(const Bucket& bucket, Slot& slot, internals::AccumulatorNode node);
  static void unhang(Slot& slot);
  void watch(const Bucket& bucket, Slot& slot);
  void on_new_node(const Bucket& bucket, Slot& slot);

  const std::shared_ptr<Buckets> buckets_;
  const std::shared_ptr<MeanGrads> grads_;
  std::weak_ptr<Listener> listener_;
};

}  // namespace zx
