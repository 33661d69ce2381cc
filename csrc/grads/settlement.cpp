#include "grads/settlement.h"

#include <utility>

#include "check.h"
#include "lanes/ranges.h"

namespace zx {

Settlement::Settlement(Line control, std::shared_ptr<Buckets> buckets, std::shared_ptr<GradPlacement> placement,
                       std::shared_ptr<Backward> backward, std::shared_ptr<Flights> flights,
                       std::shared_ptr<Params> params)
    : buckets_(std::move(buckets)),
      placement_(std::move(placement)),
      backward_(std::move(backward)),
      flights_(std::move(flights)),
      params_(std::move(params)),
      agreement_(std::move(control), [flights = flights_] { return flights->trouble(); }) {}

// A rank that is behind the others launches as often as they did, so that every message finds its partner.
void Settlement::join(const Verdict& verdict, bool empty) {
  while (backward_->progress().rounds < verdict.rounds.most) backward_->launch_round(empty);
}

// Called when something went wrong that all ranks know of. Afterwards ranks are in step again, and zero_grad() drops
// what landed.
void Settlement::abandon(const Verdict& verdict) {
  join(verdict, /*empty=*/true);
  backward_->start_over();
  placement_->start_over(/*is_step=*/false);
}

void Settlement::check(const Verdict& verdict) {
  const char* way_out = ". Call optimizer.zero_grad() on all ranks; state is as it was before";
  if (verdict.failed.most > 0) {
    abandon(verdict);
    backward_->fail("it saw an error or an exception in backward");
    TORCH_CHECK(false, "zerox: rank ", verdict.failed.most_rank, " can't go on: ", backward_->progress().failure,
                way_out);
  }
  const Extreme& place = verdict.place;
  TORCH_CHECK(place.least == place.most || place.least == static_cast<int64_t>(Place::backward_end), "zerox: rank ",
              place.least_rank, " is in ", name_of(place.least), " while rank ", place.most_rank, " is in ",
              name_of(place.most), "; every rank must make the same calls");
  if (verdict.own_rounds.least < verdict.rounds.most) {
    abandon(verdict);
    backward_->fail("ranks ran different numbers of backwards");
    TORCH_CHECK(false, "zerox: rank ", verdict.own_rounds.least_rank, " ran ", verdict.own_rounds.least,
                " synchronising backwards since the last step, rank ", verdict.rounds.most_rank, " ran ",
                verdict.rounds.most, way_out);
  }
}

Statement Settlement::statement(Place place, int64_t adoptions) {
  GradsSeen seen;
  {
    const int64_t rounds = backward_->progress().rounds;
    const Locked lock(buckets_->mutex);
    seen = placement_->look(rounds, lock);
  }
  if (!seen.refusal.empty()) backward_->fail(seen.refusal);
  const Progress progress = backward_->progress();
  return {.place = place,
          .rounds = progress.rounds,
          .own_rounds = progress.own_rounds,
          .failed = !progress.failure.empty(),
          .unsent = seen.unsent,
          .changed = seen.changed,
          .adoptions = adoptions,
          .scaled = seen.scaled,
          .proposes = params_->proposes_order(),
          .with_grad = std::move(seen.with_grad)};
}

Settled Settlement::settle(Place place, int64_t adoptions, const std::string& refusal) {
  const Range range("settle");
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(backward_->is_syncing() || place == Place::backward_end, "zerox: ", name_of(static_cast<int64_t>(place)),
              " was called inside no_sync(), where gradients are not exchanged");
  backward_->end_pass();
  if (!refusal.empty()) backward_->fail(refusal);
  // 1. Ranks tell each other where they are, and launch until all have launched the same rounds.
  Verdict verdict{};
  while (true) {
    {
      const Range range("agree");
      verdict = agreement_.agree(statement(place, adoptions));
    }
    settled_scaled_ = verdict.scaled.most > 0;
    settled_with_grad_ = verdict.with_grad;
    check(verdict);
    join(verdict, /*empty=*/false);
    placement_->complete(verdict.rounds.most, agreement_);
    // A rank without a backward of its own meets the others at the end of theirs, and then again at their step.
    const bool others_behind = verdict.place.least < static_cast<int64_t>(place);
    if (!others_behind) break;
  }
  if (place == Place::backward_end) return Settled::ready;
  // 2. What has to be the same on all ranks before they go on: orders, and parameters to adopt.
  if (verdict.rounds.most > 0 && !backward_->has_order()) learn_order();
  if (verdict.adoptions.most > 0) return Settled::adopt;
  if (verdict.proposes.least > 0) params_->set_order(agreement_.from_rank_0(params_->take_proposal()));
  // 3. What no flight took leaves, and the caller waits for all that is on its way.
  send_rest(verdict);
  flights_->land();
  // 4. The next backward begins anew.
  const bool is_step = place == Place::step;
  if (is_step) agreement_.step_begun();
  backward_->start_over();
  placement_->start_over(is_step);
  return Settled::ready;
}

// Sends what no flight of a backward took; if there is nothing, owners still hear of what was discarded.
void Settlement::send_rest(const Verdict& verdict) {
  if (verdict.unsent.most > 0) {
    placement_->send_rest(agreement_, [this] { backward_->launch_round(/*empty=*/false); });
    placement_->complete(backward_->progress().rounds, agreement_);
  } else if (verdict.changed.most > 0) {
    flights_->land();
    placement_->exchange_changes(agreement_);
  }
}

void Settlement::zero(bool set_to_none) {
  const bool raised = backward_->end_pass();
  // Where gradients are whole, the others wait at the end of the backward that raised here: they must be told.
  if (raised && placement_->meets_after_backward()) {
    const std::lock_guard lock(mutex_);
    abandon(agreement_.agree(statement(Place::backward_end, 0), "zero_grad()"));
  }
  backward_->forget_failure();
  placement_->zero(set_to_none, backward_->progress().rounds);
}

void Settlement::all_reduce(const at::Tensor& values, Combine combine) {
  const std::lock_guard lock(mutex_);
  agreement_.all_reduce(values, combine);
}

// See Note [Buckets launch in one order].
void Settlement::learn_order() {
  std::vector<int64_t> told = backward_->learned_order();
  told.push_back(backward_->progress().own_rounds > 0 ? 1 : 0);  // whether rank 0 had a backward to learn it from
  told = agreement_.from_rank_0(std::move(told));
  const bool is_learned = told.back() != 0;
  told.pop_back();
  if (is_learned) backward_->set_order(std::move(told));
}

bool Settlement::holds_scaled() const {
  const std::lock_guard lock(mutex_);
  return settled_scaled_;
}

void Settlement::bump_versions() const {
  const std::lock_guard lock(mutex_);
  buckets_->for_each_slot([this](const Slot& slot, int64_t place) {
    if (settled_with_grad_.has(place)) slot.param.unsafeGetTensorImpl()->bump_version();
  });
}

}  // namespace zx
