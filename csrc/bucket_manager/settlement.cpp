// Where ranks meet: what they tell each other at step(), clip_grad_norm_() and the like, and what follows from it.
#include "bucket_manager/bucket_manager.h"
#include "bucket_manager/packing.h"
#include "bucket_manager/ranges.h"
#include "bucket_manager/straight.h"
#include "check.h"

namespace zx {

// All buckets leave: with what p.grad holds now, or empty.
void BucketManager::launch_round(bool empty) {
  const std::lock_guard lock(mutex_);
  order_.begin(std::vector<int64_t>(buckets_.size(), 1));
  finish_pass(/*own=*/false, empty);
}

// Whoever stayed behind the others launches as often as they did, so that no message stays without its partner.
void BucketManager::join(const Verdict& verdict, bool empty) {
  while (pass_.rounds < verdict.rounds.most) launch_round(empty);
}

// Something went wrong that all ranks know of. They are in step again afterwards; zero_grad() drops what landed.
void BucketManager::abandon(const Verdict& verdict) {
  join(verdict, /*empty=*/true);
  pass_.rounds = pass_.own_rounds = pass_.gathered = 0;
}

void BucketManager::check(const Verdict& verdict) {
  const char* way_out = ". Call optimizer.zero_grad() on all ranks; state is as it was before";
  if (verdict.failed.most > 0) {
    abandon(verdict);
    if (pass_.failure.empty()) pass_.failure = "it saw an error or an exception in backward";
    TORCH_CHECK(false, "zerox: rank ", verdict.failed.most_rank, " can't go on: ", pass_.failure, way_out);
  }
  const Extreme& place = verdict.place;
  TORCH_CHECK(place.least == place.most || place.least == static_cast<int64_t>(Place::backward_end), "zerox: rank ",
              place.least_rank, " is in ", name_of(place.least), " while rank ", place.most_rank, " is in ",
              name_of(place.most), "; every rank must make the same calls");
  if (verdict.own_rounds.least < verdict.rounds.most) {
    abandon(verdict);
    pass_.failure = "ranks ran different numbers of backwards";
    TORCH_CHECK(false, "zerox: rank ", verdict.own_rounds.least_rank, " ran ", verdict.own_rounds.least,
                " synchronising backwards since the last step, rank ", verdict.rounds.most_rank, " ran ",
                verdict.rounds.most, way_out);
  }
}

// Waits for all ranks; if they don't answer, says where, and what else is awaited of them.
void BucketManager::ask(const char* where, const std::function<void()>& question) {
  try {
    question();
  } catch (const std::exception& error) {
    const std::string awaited = flights_.trouble();
    TORCH_CHECK(false, "zerox: in ", where, " a rank did not answer: ", reason_of(error), "\n",
                awaited.empty() ? "no bucket is awaited: all gradients that were sent have arrived" : awaited);
  }
}

void BucketManager::all_reduce(const at::Tensor& values, Combine combine) {
  ask(name_of(static_cast<int64_t>(Place::clip)), [&] { agreement_.all_reduce(values, combine); });
}

Statement BucketManager::statement(Place place, int64_t adoptions) {
  GradsSeen seen = look_at_grads();  // may find a failure
  return {.place = place,
          .rounds = pass_.rounds,
          .own_rounds = pass_.own_rounds,
          .failed = !pass_.failure.empty(),
          .unsent = seen.unsent,
          .changed = seen.changed,
          .adoptions = adoptions,
          .scaled = seen.scaled,
          .proposes = !gathers_.order().proposed.empty(),
          .with_grad = std::move(seen.with_grad)};
}

Settled BucketManager::settle(Place place, int64_t adoptions, const std::string& refusal) {
  const Range range("settle");
  TORCH_CHECK(sync_ || place == Place::backward_end, "zerox: ", name_of(static_cast<int64_t>(place)),
              " was called inside no_sync(), where gradients are not exchanged");
  {
    const std::lock_guard lock(mutex_);
    flush_pass();
    if (!refusal.empty()) pass_.failure = refusal;
  }
  const char* where = name_of(static_cast<int64_t>(place));
  Verdict verdict{};
  while (true) {
    ask(where, [&] {
      const Range range("agree");
      verdict = agreement_.agree(statement(place, adoptions));
    });
    settled_with_ = {.scaled = verdict.scaled.most > 0, .with_grad = verdict.with_grad};
    check(verdict);
    join(verdict, /*empty=*/false);
    if (options_.whole_grads) gather_whole_grads();
    // A rank without a backward of its own meets the others at the end of theirs, and then again at their step.
    const bool others_behind = verdict.place.least < static_cast<int64_t>(place);
    if (!others_behind) break;
  }
  if (place == Place::backward_end) return Settled::ready;
  if (verdict.rounds.most > 0 && !order_.is_set()) ask(where, [&] { learn_order(); });
  if (verdict.adoptions.most > 0) return Settled::adopt;
  if (verdict.proposes.least > 0) ask(where, [&] { learn_gather_order(); });
  if (verdict.unsent.most > 0) {
    if (options_.whole_grads) agree_on_unsent();
    launch_round(/*empty=*/false);
    pass_.only_unsent = false;
    if (options_.whole_grads) gather_whole_grads();
  } else if (verdict.changed.most > 0) {
    flights_.land();
    ask(where, [&] { exchange_changes(); });
  }
  flights_.land();
  if (place == Place::step) agreement_.step_begun();
  pass_.rounds = pass_.own_rounds = pass_.gathered = 0;
  if (place == Place::step && options_.whole_grads) forget_reached();
  return Settled::ready;
}

// One look at all parameters, whose number is what a step of small ones costs.
GradsSeen BucketManager::look_at_grads() {
  GradsSeen seen;
  seen.with_grad = SlotSet(num_slots());
  int64_t index = 0;
  for (const auto& bucket : buckets_) {
    for (Slot& slot : bucket->slots) {
      const at::Tensor& grad = slot.param.grad();
      if (grad.defined()) seen.with_grad.add(index);
      ++index;
      if (grad.defined() && !(slot.placeholder.defined() && grad.is_same(slot.placeholder))) {
        if (pass_.failure.empty()) pass_.failure = refusal_of(slot, options_.device);
        // Whole gradients of a round that is not over yet have left too.
        const bool all_left = pass_.gathered != pass_.rounds;
        seen.unsent |= !options_.whole_grads || (exchange_ != nullptr && !all_left && slot.whole.is_local(grad));
      }
      seen.scaled |= slot.seen.scaled.is(grad);
      if (options_.whole_grads) continue;
      if (slot.held && !grad.defined()) {
        slot.held = false;
        slot.replace = true;
      }
      seen.changed |= slot.replace || slot.zeroed;
    }
  }
  return seen;
}

// Owners hear what was discarded or zeroed since the last flight: two bytes a parameter, and rarely.
void BucketManager::exchange_changes() {
  std::vector<uint8_t> changes;
  for (const auto& bucket : buckets_) {
    for (Slot& slot : bucket->slots) {
      changes.push_back(slot.replace || slot.zeroed);
      changes.push_back(slot.zeroed);
      slot.replace = false;
      slot.zeroed = false;
    }
  }
  agreement_.take_largest(changes);
  size_t at = 0;
  for (const auto& bucket : buckets_) {
    const int64_t first = rank() * bucket->shard_numel;
    int64_t segment = 0;
    for (const Slot& slot : bucket->slots) {
      const bool replaced = changes[at++] != 0;
      const bool zeroed = changes[at++] != 0;
      const int64_t start = std::max(slot.offset, first);
      const int64_t stop = std::min(slot.offset + slot.numel(), first + bucket->shard_numel);
      if (!bucket->owns_part_of(slot, rank())) continue;
      if (replaced && bucket->landed.holds) {
        join_pieces(*bucket);
        bucket->landed.shard.narrow(0, start - first, stop - start).zero_();
        bucket->landed.present[segment] = zeroed ? 1 : 0;
        bucket->landed.words.reset();
      }
      ++segment;
    }
  }
}

// See Note [Buckets launch in one order].
void BucketManager::learn_order() {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> told = order_.learned();
  told.push_back(pass_.own_rounds > 0 ? 1 : 0);  // whether rank 0 had a backward to learn it from
  told = agreement_.from_rank_0(std::move(told));
  const bool is_learned = told.back() != 0;
  told.pop_back();
  if (is_learned) order_.set_order(std::move(told));
}

void BucketManager::learn_gather_order() {
  GatherOrder& order = gathers_.order();
  order.agreed = agreement_.from_rank_0(std::move(order.proposed));
  order.proposed.clear();
}

}  // namespace zx
