// When: watches autograd for gradients, and sends each bucket on its way when its turn comes.
//
//   GradHooks -> Backward (hooks.cpp) -> LaunchOrder -> Packing -> Flights
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "buckets/buckets.h"
#include "grads/before_next.h"
#include "grads/decision.h"
#include "grads/flights.h"
#include "grads/grad_hooks.h"
#include "grads/launch_order.h"
#include "grads/mean_grads.h"
#include "grads/pace.h"
#include "grads/packing.h"
#include "grads/pass.h"
#include "grads/progress.h"

namespace zx {

// Any thread may call any of these.
class Backward final : public GradHooks::Listener, public std::enable_shared_from_this<Backward> {
 public:
  Backward(std::shared_ptr<Buckets> buckets, std::shared_ptr<MeanGrads> grads, std::shared_ptr<Flights> flights,
           bool paced);
  ~Backward() override;  // removes the hooks and placeholders
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;

  // `on_end` is called, without the lock, when a backward ends, if all ranks synchronize there. It must be set before a
  // bucket is added.
  void set_on_end(std::function<void()> on_end) { on_end_ = std::move(on_end); }

  // Adds a new bucket, and takes its parameters' gradients from now on.
  void add(const std::shared_ptr<Bucket>& bucket);

  // Whether some rank takes part only at a sync point, so that nothing is reduced before.
  void set_followed(bool followed);
  bool followed() const;
  // False: gradients stay local and accumulate (no_sync).
  void set_sync(bool sync);
  // Has the forward of a wrapper decide for a slot: see Note [Forward decides]. Null: none does any more.
  void set_decision(int64_t bucket, int64_t slot, std::shared_ptr<Decision> decision);
  // To be called inside a backward, on autograd's thread: it is sent, also if it reaches no slot here, unless this
  // decision keeps it. `accumulates`: a gradient outside all buckets is there, else the graph task is looked at.
  // `inside`: the forward ran inside another backward, so this graph task is all of its own.
  void begin(const std::shared_ptr<Decision>& decision, bool accumulates, bool inside);
  // Whether zero_grad() must come before anything else.
  bool has_failed() const;
  // True: what leaves stays on the inner axis (no_sync(outer=True)). Throws after a round that did not, in this step.
  void set_stays_inner(bool stays);
  bool is_syncing() const;
  // `call` is called once, before the next gradient is accumulated.
  void set_before_next(std::function<void()> call) { before_next_.set(std::move(call)); }
  void before_next() { before_next_.call(); }

  // Of the next passes: see Pace.
  void wait_longer(std::chrono::milliseconds most, std::function<bool()> ends) {
    pace_.wait_longer(most, std::move(ends));
  }

  // See GradHooks.
  std::string restore_watches() { return hooks_.restore_watches(); }

  // To be called when the optimizer is called, since no backward is running then: ends the pass that is open. Returns
  // whether its backward raised.
  bool end_pass();
  // Launches all buckets, with what p.grad holds now, or without gradients if `empty`.
  void launch_round(bool empty, bool stays_inner = false);

  Progress progress() const;
  // See Progress.
  void fail(const std::string& why);
  void note_zeroed();
  // To be called when ranks are in step: rounds are counted anew.
  void start_over();
  // Whether nothing was launched since start_over(), and nothing is about to be.
  bool is_synced() const;

  // See Note [Buckets launch in one order].
  bool has_order() const;
  LaunchOrder order() const;
  void set_order(std::vector<int64_t> order);

 private:
  // hooks.cpp: on autograd's thread.
  void before_accumulate(const Bucket& bucket, Slot& slot) override;
  void after_accumulate(Bucket& bucket, Slot& slot) override;
  bool note_gradient(Bucket& bucket, Slot& slot);
  bool is_last_gradient(Slot& slot);
  void await_end(const Locked& lock);
  void on_backward_end(int64_t task);

  // Under the lock.
  void open_pass(const Locked& lock);
  void finish_pass(bool own, bool empty, const Locked& lock);
  void launch(int64_t bucket, bool empty, const Locked& lock);

  const std::shared_ptr<Buckets> buckets_;
  const std::shared_ptr<MeanGrads> grads_;
  const std::shared_ptr<Flights> flights_;
  const Packing packing_;
  std::function<void()> on_end_;
  BeforeNext before_next_;  // called without the lock
  GradHooks hooks_;
  // Under buckets_->mutex.
  LaunchOrder order_;
  Pass pass_;
  Progress progress_;
  Pace pace_;
  bool sync_ = true;
};

}  // namespace zx
