// Together: at a sync point, what they tell each other there, and what follows from it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "buckets/buckets.h"
#include "grads/agreement.h"
#include "grads/backward.h"
#include "grads/flights.h"
#include "grads/mean_grads.h"
#include "grads/own_status.h"
#include "params/params.h"
#include "workers/stopwatch.h"

namespace zx {

// In a forked child every function that changes or waits for something throws: see Note [Forks].
class Synchronizer {
 public:
  Synchronizer(Communicator control, std::shared_ptr<Buckets> buckets, std::shared_ptr<MeanGrads> grads,
               std::shared_ptr<Backward> backward, std::shared_ptr<Flights> flights, std::shared_ptr<Params> params);

  // Collective. Afterwards everything that ranks launched has been reduced, the same on all ranks, unless the
  // SyncResult says that parameters are to be adopted first. Throws on all ranks if they disagree, or if one has a
  // `refusal`.
  SyncResult sync(const Call& call);

  // `call` is called before ranks synchronize at the end of a backward. For torch's Join, which has a sync point of its
  // own.
  void set_before_backward_end(std::function<void()> call) { before_backward_end_ = std::move(call); }
  // `call` is called when ranks have synchronized at the end of a backward, and none has raised. For gradients that are
  // in no bucket.
  void set_after_backward_end(std::function<void()> call) { after_backward_end_ = std::move(call); }
  // Collective: the end of a backward.
  void end_backward();

  // See OwnStatus.
  void set_following(bool by_backward, bool by_active) { own_status_.set_following({by_backward, by_active}); }

  // Does what Optimizer.zero_grad() does. It is local and never blocks, with one exception: if gradients are whole and
  // backward raised here, it tells the other ranks, which wait at the end of their backward.
  void zero(bool set_to_none);

  // Collective: a few integers on the CPU, combined over the ranks in place, for clip_grad_norm_().
  void all_reduce(const at::Tensor& values, Combine combine);

  // From now on this rank says these numbers at a sync point: as many on all ranks, who must call this at the same
  // sync point if their count changes.
  void set_piggyback(std::vector<int64_t> piggyback);
  // What ranks said so at the last sync(), by rank.
  std::vector<int64_t> piggybacks() const;

  // Whether, at the last sync(), any rank still held a gradient that mark_scaled() saw.
  bool holds_scaled() const;
  // To be called after an update. Bumps the version of each parameter for which the last sync() found a gradient, so
  // that a backward through its old value raises, as after torch's optimizers. The update itself is below version
  // counters.
  void bump_versions() const;
  // A count that rises with every flight launched (sync() also launches for other ranks' rounds), and with every
  // gradient that is only counted.
  int64_t num_added() const { return flights_->num_launched() + grads_->num_counted(); }
  // How long threads have been in sync() and all_reduce(), where they wait for what is under way.
  int64_t waited_ns() const { return waited_.total_ns(); }

 private:
  LocalStatus local_status(const Call& call);
  ReducedStatus exchange_statuses(const Call& call);
  void check(const ReducedStatus& reduced);
  void finish(const ReducedStatus& reduced, SyncPoint sync_point, bool rests);
  void catch_up(const ReducedStatus& reduced, bool empty);
  void abandon(const ReducedStatus& reduced);
  std::string abandon_with_reason(const ReducedStatus& reduced);
  void send_rest(const ReducedStatus& reduced, bool rests);
  bool rests(const Call& call) const;
  double scale(const ReducedStatus& reduced) const;
  void learn_order();

  mutable ProcessMutex<LockRank::synchronizer> mutex_;  // of all below: see Note [Locks]
  std::shared_ptr<Buckets> buckets_;
  std::shared_ptr<MeanGrads> grads_;
  std::shared_ptr<Backward> backward_;
  std::shared_ptr<Flights> flights_;
  std::shared_ptr<Params> params_;
  Agreement agreement_;
  std::function<void()> before_backward_end_;
  std::function<void()> after_backward_end_;
  OwnStatus own_status_;
  LastStatus last_status_;
  Stopwatch waited_;
};

}  // namespace zx
