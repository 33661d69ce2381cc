#include "grads/synchronizer.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "check.h"
#include "workers/ranges.h"

namespace zx {
namespace {

constexpr const char* kUneven = ". If ranks have unequal numbers of batches, put their loops inside optimizer.join()";

// Whether a training loop makes the call for each batch, so that ranks with other numbers of batches may differ. What
// p.grad is asked is rather asked on one rank alone.
constexpr bool is_per_batch(int64_t sync_point) {
  return sync_point <= kLastFollowed && sync_point != static_cast<int64_t>(SyncPoint::grad_norm);
}

// Ranks at the same sync point must have passed the same: the same bits, since NaN stands for what the host does not
// know.
void check_arguments(const ReducedStatus& reduced) {
  const Arguments& least = reduced.least_arguments;
  const Arguments& most = reduced.most_arguments;
  const auto same_bits = [](double a, double b) { return std::bit_cast<int64_t>(a) == std::bit_cast<int64_t>(b); };
  const auto differ = std::mismatch(least.begin(), least.end(), most.begin(), same_bits);
  if (differ.first == least.end()) return;
  const auto sync_point = static_cast<SyncPoint>(reduced[Said::sync_point].most);  // this rank may follow
  TORCH_CHECK(false, "zerox: ranks passed different arguments to ", name_of(sync_point), ": ", *differ.first, " and ",
              *differ.second, "; every rank must pass the same");
}

}  // namespace

Synchronizer::Synchronizer(Communicator control, std::shared_ptr<Buckets> buckets, std::shared_ptr<MeanGrads> grads,
                           std::shared_ptr<Backward> backward, std::shared_ptr<Flights> flights,
                           std::shared_ptr<Params> params)
    : buckets_(std::move(buckets)),
      grads_(std::move(grads)),
      backward_(std::move(backward)),
      flights_(std::move(flights)),
      params_(std::move(params)),
      agreement_(std::move(control), [flights = flights_] { return flights->trouble(); }) {}

// A rank that is behind the others launches as often as they did, so that every message finds its partner.
void Synchronizer::catch_up(const ReducedStatus& reduced, bool empty) {
  const int64_t inner = reduced[Said::inner_rounds].least == kNoBackward ? 0 : reduced[Said::inner_rounds].least;
  for (int64_t round = backward_->progress().rounds().all; round < reduced[Said::rounds].most; ++round) {
    backward_->launch_round(empty, /*stays_inner=*/round < inner);
  }
}

// Called when something went wrong that all ranks know of. Afterwards ranks are in step again, and zero_grad() drops
// what was reduced.
void Synchronizer::abandon(const ReducedStatus& reduced) {
  catch_up(reduced, /*empty=*/true);
  backward_->start_over();
  grads_->start_over(/*is_step=*/false);
}

// The same where a rank failed; returns why, as that rank tells it.
std::string Synchronizer::abandon_with_reason(const ReducedStatus& reduced) {
  abandon(reduced);
  return agreement_.text_from(reduced[Said::failed].most_rank, backward_->progress().failure());
}

void Synchronizer::check(const ReducedStatus& reduced) {
  const char* way_out = ". Call optimizer.zero_grad() on all ranks; state is as it was before";
  if (reduced[Said::failed].most > 0) {
    const std::string why = abandon_with_reason(reduced);
    backward_->fail("another rank can't: " + why);
    TORCH_CHECK(false, "zerox: rank ", reduced[Said::failed].most_rank, " can't go on: ", why, way_out);
  }
  const std::string clash = grads_->learn_placements(reduced.placements);
  if (!clash.empty()) {
    abandon(reduced);
    backward_->fail(clash);
    TORCH_CHECK(false, "zerox: ", clash, way_out);
  }
  const Extreme& sync_point = reduced[Said::sync_point];
  if (sync_point.least == static_cast<int64_t>(SyncPoint::follow) && sync_point.most > kLastFollowed) {
    const std::string call = agreement_.text_from(sync_point.most_rank, Doing::current_text());
    TORCH_CHECK(false, "zerox: rank ", sync_point.least_rank,
                " has run out of batches inside optimizer.join(), and can't follow rank ", sync_point.most_rank,
                " into ", call, ": make this call outside join(), on all ranks");
  }
  const Extreme& active = reduced[Said::active];
  if (active.least < sync_point.most && active.least != static_cast<int64_t>(SyncPoint::backward_end)) {
    const std::string other = agreement_.text_from(active.least_rank, Doing::current_text());
    const std::string call = agreement_.text_from(sync_point.most_rank, Doing::current_text());
    TORCH_CHECK(false, "zerox: rank ", active.least_rank, " is in ", other, " while rank ", sync_point.most_rank,
                " is in ", call,
                is_per_batch(sync_point.most) ? c10::str("; every rank must make the same calls", kUneven)
                                              : c10::str(": call ", call, " on all ranks, after the same step"));
  }
  if (reduced[Said::own_rounds].least < reduced[Said::rounds].most) {
    abandon(reduced);
    backward_->fail("ranks ran different numbers of backwards");
    TORCH_CHECK(false, "zerox: rank ", reduced[Said::own_rounds].least_rank, " ran ", reduced[Said::own_rounds].least,
                " synchronising backwards since the last step, rank ", reduced[Said::rounds].most_rank, " ran ",
                reduced[Said::rounds].most, way_out, kUneven);
  }
  const Extreme& order = reduced[Said::order];
  if (order.least != kNoBackward && order.least != -reduced[Said::less_order].least) {
    const std::string why =
        c10::str("zerox: rank ", order.least_rank, " and rank ", reduced[Said::less_order].least_rank,
                 " launched their buckets in different orders. Their messages have wrong "
                 "partners, and the optimizer can't be used any more");
    agreement_.leave(why);
    TORCH_CHECK(false, why);
  }
  const Extreme& inner = reduced[Said::inner_rounds];
  const Extreme& outer = reduced[Said::outer_rounds];
  if (inner.least != kNoBackward && inner.least + outer.least < reduced[Said::rounds].most) {
    const std::string why =
        c10::str("zerox: rank ", inner.least_rank, " ran ", inner.least, " backwards inside no_sync(outer=True), rank ",
                 outer.least_rank, " ran ", reduced[Said::rounds].most - outer.least,
                 ". Their messages have no partners, and the optimizer can't be used any more");
    agreement_.leave(why);
    TORCH_CHECK(false, why);
  }
  const Extreme& dropped = reduced[Said::dropped];
  if (dropped.least != kNoBackward && dropped.least != -reduced[Said::less_dropped].least) {
    abandon(reduced);
    backward_->fail("gradients were discarded on some ranks only");
    TORCH_CHECK(false, "zerox: between backwards inside no_sync(outer=True) rank ", dropped.least_rank, " and rank ",
                reduced[Said::less_dropped].least_rank, " discarded other gradients, and what waits can't be told",
                way_out);
  }
}

LocalStatus Synchronizer::local_status(const Call& call) {
  GradsSeen seen;
  SlotSet placements;
  {
    const int64_t rounds = backward_->progress().rounds().all;
    const Locked lock(buckets_->mutex);
    seen = grads_->look(rounds, lock);
    placements = grads_->seen_placements();
  }
  if (const std::string unseen = backward_->restore_watches(); !unseen.empty()) backward_->fail(unseen);
  // Full state needs no gradients: a model may have left for another device, and they with it.
  if (!seen.refusal.empty() && call.sync_point != SyncPoint::full_state) backward_->fail(seen.refusal);
  if (seen.touched && call.sync_point == SyncPoint::step && backward_->followed()) {
    backward_->fail(
        "it wrote to p.grad before step(), as torch's clip_grad_norm_() does, and a rank that has run out of batches "
        "inside join() can't do the same: call optimizer.clip_grad_norm_(), or build the optimizer with stage=2");
  }
  const Progress progress = backward_->progress();
  if (progress.rounds().own > 0 || seen.unsent) own_status_.note_gradient();
  return {.call = call,
          .rounds = progress.rounds(),
          .failed = !progress.failure().empty(),
          .unsent = seen.unsent || progress.rounds().inner.has_left,
          .changed = seen.changed,
          .scaled = seen.scaled,
          .zeroed = own_status_.take_zeroed() || grads_->has_lost_mean(),
          .active = call.sync_point != SyncPoint::follow || own_status_.counts(),
          .proposes = params_->proposes_order(),
          .with_grad = std::move(seen.with_grad),
          .placements = std::move(placements),
          .piggyback = own_status_.piggyback()};
}

// One exchange of local statuses. Afterwards ranks have launched the same rounds.
ReducedStatus Synchronizer::exchange_statuses(const Call& call) {
  const bool was_zeroed = own_status_.is_zeroed() || grads_->has_lost_mean();
  ReducedStatus reduced{};
  {
    const Range range("agree");
    reduced = agreement_.agree(local_status(call));
  }
  last_status_.keep(reduced);
  check(reduced);
  const bool followed = reduced[Said::sync_point].least == static_cast<int64_t>(SyncPoint::follow);
  backward_->set_followed(followed);
  // What a follower still holds is of an older step, which the others have zeroed.
  const int64_t rounds = backward_->progress().rounds().all;
  const bool comes_new = reduced[Said::rounds].most > rounds;
  if (call.sync_point == SyncPoint::follow && reduced[Said::zeroed].most > 0 && !was_zeroed) {
    grads_->zero(/*set_to_none=*/true, rounds);
  } else if (call.sync_point == SyncPoint::follow && comes_new && own_status_.is_behind()) {
    grads_->forget_old(rounds);
  }
  if (call.sync_point == SyncPoint::follow && comes_new) backward_->before_next();  // it runs no backward that does
  if (comes_new || rounds > 0) own_status_.note_sent();
  {
    const auto wakes = c10::make_scope_exit([this] { grads_->set_rests(false); });
    grads_->set_rests(rests(call));
    catch_up(reduced, /*empty=*/false);
  }
  grads_->complete(reduced[Said::rounds].most, scale(reduced), agreement_);
  return reduced;
}

// Whether this rank sends zeros in what it launches.
bool Synchronizer::rests(const Call& call) const { return call.sync_point == SyncPoint::follow && own_status_.rests(); }

// What a mean over all ranks is multiplied by.
double Synchronizer::scale(const ReducedStatus& reduced) const {
  if (!own_status_.following().by_active || reduced.num_active == 0) return 1.0;
  return static_cast<double>(agreement_.num_ranks()) / static_cast<double>(reduced.num_active);
}

SyncResult Synchronizer::sync(const Call& call) {
  const Range range("settle");
  const Stopwatch::Lap lap(waited_);
  const Doing doing([&call] { return std::string(name_of(call.sync_point)); },
                    is_per_batch(static_cast<int64_t>(call.sync_point)));
  if (call.sync_point == SyncPoint::backward_end && before_backward_end_) before_backward_end_();
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(backward_->is_syncing() || call.sync_point == SyncPoint::backward_end, "zerox: ", Doing::current_text(),
              " was called inside no_sync(), where gradients are not exchanged");
  backward_->end_pass();
  if (!call.refusal.empty()) backward_->fail(call.refusal);
  // 1. Ranks tell each other where they are, and launch until all have launched the same rounds. A rank without a
  // backward of its own meets the others at the end of theirs, and then again at their next call.
  constexpr auto kBackwardEnd = static_cast<int64_t>(SyncPoint::backward_end);
  ReducedStatus reduced = exchange_statuses(call);
  while (reduced[Said::active].least == kBackwardEnd && call.sync_point != SyncPoint::backward_end)
    reduced = exchange_statuses(call);
  const auto sync_point = static_cast<SyncPoint>(reduced[Said::sync_point].most);  // a follower is where the others are
  SyncResult result{.adopts = reduced[Said::adoptions].most > 0,
                    .sync_point = sync_point,
                    .arguments = reduced.most_arguments,
                    .has_same_options = reduced.has_same_options,
                    .has_same_operators = reduced.has_same_operators,
                    .has_same_params = reduced.has_same_params,
                    .operators = reduced.operators,
                    .followed = reduced[Said::sync_point].least == static_cast<int64_t>(SyncPoint::follow),
                    .num_active = reduced.num_active,
                    .speaker = reduced[Said::active].least_rank};
  if (call.sync_point == SyncPoint::backward_end) grads_->show(reduced.with_grad);
  if (call.sync_point == SyncPoint::backward_end || sync_point == SyncPoint::follow) return result;
  check_arguments(reduced);
  // 2. What has to be the same on all ranks before they go on: orders, and parameters to adopt.
  if (reduced[Said::rounds].most > 0 && !backward_->has_order()) learn_order();
  if (result.adopts) return result;
  if (reduced[Said::proposes].least > 0) params_->set_order(agreement_.from_rank_0(params_->take_proposal()));
  finish(reduced, sync_point, rests(call));
  return result;
}

void Synchronizer::end_backward() {
  sync({.sync_point = SyncPoint::backward_end});
  if (after_backward_end_) after_backward_end_();
}

void Synchronizer::finish(const ReducedStatus& reduced, SyncPoint sync_point, bool rests) {
  // 3. What no flight took leaves, and the caller waits for all that is on its way.
  send_rest(reduced, rests);
  flights_->await_all();
  // 4. The next backward begins anew.
  const bool is_step = sync_point == SyncPoint::step;
  if (is_step) agreement_.step_begun();
  backward_->start_over();
  grads_->start_over(is_step);
  if (is_step || sync_point == SyncPoint::skip_step) own_status_.begin_step();
}

// Sends what no flight of a backward took; if there is nothing, owners still hear of what was discarded.
void Synchronizer::send_rest(const ReducedStatus& reduced, bool rests) {
  if (reduced[Said::unsent].most > 0) {
    const auto wakes = c10::make_scope_exit([this] { grads_->set_rests(false); });
    grads_->set_rests(rests);
    grads_->send_rest(agreement_, [this] { backward_->launch_round(/*empty=*/false); });
    grads_->complete(backward_->progress().rounds().all, scale(reduced), agreement_);
  } else if (reduced[Said::changed].most > 0) {
    flights_->await_all();
    grads_->exchange_changes(agreement_);
  }
}

void Synchronizer::zero(bool set_to_none) {
  const bool raised = backward_->end_pass();
  // Where gradients are whole, the others wait at the end of the backward that raised here: they must be told.
  if (raised && grads_->syncs_after_backward()) {
    const Doing doing([] { return std::string("zero_grad()"); }, /*per_batch=*/true);
    const std::lock_guard lock(mutex_);
    abandon_with_reason(agreement_.agree(local_status({.sync_point = SyncPoint::backward_end})));
  }
  backward_->restore_watches();
  backward_->note_zeroed();
  own_status_.note_zeroed();
  grads_->zero(set_to_none, backward_->progress().rounds().all);
}

void Synchronizer::all_reduce(const at::Tensor& values, Combine combine) {
  const Stopwatch::Lap lap(waited_);
  const std::lock_guard lock(mutex_);
  const Doing doing([where = agreement_.where()] { return where; }, /*per_batch=*/true);
  agreement_.all_reduce(values, combine);
}

// See Note [Buckets launch in one order].
void Synchronizer::learn_order() {
  std::vector<int64_t> told = backward_->order().learned();
  told.push_back(backward_->progress().rounds().own > 0 ? 1 : 0);  // whether rank 0 had a backward to learn it from
  told = agreement_.from_rank_0(std::move(told));
  const bool is_learned = told.back() != 0;
  told.pop_back();
  if (is_learned) backward_->set_order(std::move(told));
}

void Synchronizer::set_piggyback(std::vector<int64_t> piggyback) {
  const std::lock_guard lock(mutex_);
  own_status_.set_piggyback(std::move(piggyback));
}

std::vector<int64_t> Synchronizer::piggybacks() const {
  const std::lock_guard lock(mutex_);
  return last_status_.piggybacks();
}

bool Synchronizer::holds_scaled() const {
  const std::lock_guard lock(mutex_);
  return last_status_.holds_scaled();
}

void Synchronizer::bump_versions() const {
  const std::lock_guard lock(mutex_);
  buckets_->for_each_slot([this](const Slot& slot, int64_t position) {
    if (last_status_.has_grad(position)) slot.param.unsafeGetTensorImpl()->bump_version();
  });
}

}  // namespace zx
