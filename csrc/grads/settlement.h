// Together: where ranks meet, what they tell each other there, and what follows from it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "buckets/buckets.h"
#include "grads/agreement.h"
#include "grads/backward.h"
#include "grads/flights.h"
#include "grads/grad_placement.h"
#include "params/params.h"

namespace zx {

// What settle() found that its caller must act on.
enum class Settled { ready, adopt };

// In a forked child whatever changes or waits for something throws: see Note [Forks].
class Settlement {
 public:
  Settlement(Line control, std::shared_ptr<Buckets> buckets, std::shared_ptr<GradPlacement> placement,
             std::shared_ptr<Backward> backward, std::shared_ptr<Flights> flights, std::shared_ptr<Params> params);

  // Collective. Everything that ranks launched has landed afterwards, on all ranks the same. Throws on all ranks if
  // they disagree about it, or one passes a `refusal`: why it can't go on. Settled::adopt: some rank passed
  // adoptions > 0; make them and call again.
  Settled settle(Place place, int64_t adoptions, const std::string& refusal = "");

  // As Optimizer.zero_grad(); local, and never blocks but for whole gradients after a backward that raised: there it
  // tells the others, who wait at the end of theirs.
  void zero(bool set_to_none);

  // Collective: a few integers on the CPU, combined over the ranks in place, for clip_grad_norm_().
  void all_reduce(const at::Tensor& values, Combine combine);

  // At the last settle(): whether any rank still held a gradient that mark_scaled() saw.
  bool holds_scaled() const;
  // After an update: tells autograd of the parameters that the last settle() found a gradient of, so that a backward
  // through their old values raises, as after torch's optimizers. The update itself is below version counters.
  void bump_versions() const;
  // A count that rises with every flight launched, on any rank, and with every gradient that none takes.
  int64_t num_added() const { return flights_->num_launched() + placement_->num_counted(); }

 private:
  Statement statement(Place place, int64_t adoptions);
  void check(const Verdict& verdict);
  void join(const Verdict& verdict, bool empty);
  void abandon(const Verdict& verdict);
  void send_rest(const Verdict& verdict);
  void learn_order();

  mutable ProcessMutex mutex_;  // of all below: see Note [Locks]
  std::shared_ptr<Buckets> buckets_;
  std::shared_ptr<GradPlacement> placement_;
  std::shared_ptr<Backward> backward_;
  std::shared_ptr<Flights> flights_;
  std::shared_ptr<Params> params_;
  Agreement agreement_;
  // What the last settle() saw, on any rank.
  bool settled_scaled_ = false;
  SlotSet settled_with_grad_;
};

}  // namespace zx
