#include "bucket_manager/bucket_manager.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "bucket_manager/packing.h"
#include "bucket_manager/ranges.h"
#include "bucket_manager/straight.h"
#include "check.h"

namespace zx {

BucketManager::BucketManager(std::shared_ptr<Exchange> exchange, Group control, ManagerOptions options)
    : exchange_(std::move(exchange)),
      agreement_(std::move(control)),
      options_(options),
      flights_(exchange_, options.device),
      gathers_({"the updated parameters", "gather", "gather_wait"}) {}

BucketManager::~BucketManager() {
  for (const auto& bucket : buckets_) {
    for (Slot& slot : bucket->slots) {
      remove_hooks(slot);
      at::Tensor& grad = slot.param.mutable_grad();
      if (grad.defined() && slot.placeholder.defined() && grad.is_same(slot.placeholder)) grad.reset();
    }
  }
}

int64_t BucketManager::add_bucket(BucketSpec spec) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!pass_.open, "zerox: parameters can't be added inside a backward");
  auto bucket = std::make_shared<Bucket>();
  bucket->index = static_cast<int64_t>(buckets_.size());
  bucket->flat = std::move(spec.flat);
  bucket->wire_dtype = spec.wire_dtype;
  bucket->shard_numel = spec.shard_numel;
  bucket->trailer_numel = spec.trailer_numel;
  bucket->segments = std::move(spec.segments);
  bucket->keeps_shard = options_.keeps_shards;
  const bool straight = exchange_ ? exchange_->sends_messages() : stay_in_place(*bucket);
  if (straight) bucket->num_straight = spec.num_straight;
  if (bucket->keeps_shard) {
    bucket->landed.shard = at::zeros({bucket->shard_numel}, bucket->flat.options().dtype(bucket->wire_dtype));
  }
  const auto bytes = bucket->segments.options().dtype(at::kByte);
  bucket->landed.present = at::zeros({bucket->segments.size(0)}, bytes);
  bucket->landed.replaced = at::zeros({bucket->segments.size(0)}, bytes);
  for (SlotSpec& slot : spec.slots) {
    bucket->slots.push_back({.name = std::move(slot.name),
                             .param = slot.param,
                             .placeholder = slot.placeholder,
                             .offset = slot.offset,
                             .home = slot.param.detach(),
                             .hooks = {}});
    bucket->slots.back().unsent = options_.whole_grads && slot.param.grad().defined();
  }
  bucket->parts =
      parts_of(*bucket, rank(), flights_.most_in_a_part(static_cast<int64_t>(c10::elementSize(spec.wire_dtype))));
  buckets_.push_back(bucket);
  order_.add_bucket();
  gathers_.order() = {};
  for (Slot& slot : bucket->slots) install_hooks(*bucket, slot);
  return bucket->index;
}

// What holds for nearly every parameter at every step, in as few looks as there are.
static bool is_still(const at::Tensor& param, const at::Tensor& home) {
  return param.unsafeGetTensorImpl()->unsafe_storage().is_alias_of(home.unsafeGetTensorImpl()->unsafe_storage()) &&
         param.storage_offset() == home.storage_offset() && param.sizes() == home.sizes() &&
         param.strides() == home.strides();
}

void BucketManager::set_sync(bool sync) {
  const std::lock_guard lock(mutex_);
  sync_ = sync;
}

void BucketManager::start_gather(int64_t bucket, bool background) {
  const auto& started = buckets_.at(bucket);
  if (exchange_) gathers_.start(started, started->flat, *exchange_, background);
}

std::vector<std::pair<int64_t, int64_t>> BucketManager::moved() const {
  std::vector<std::pair<int64_t, int64_t>> found;
  for (const auto& bucket : buckets_) {
    for (size_t slot = 0; slot < bucket->slots.size(); ++slot) {
      const at::Tensor& param = bucket->slots[slot].param;
      const at::Tensor& home = bucket->slots[slot].home;
      if (is_still(param, home)) continue;
      const bool same = param.sizes() == home.sizes() && param.strides() == home.strides() &&
                        (home.numel() == 0 || param.const_data_ptr() == home.const_data_ptr());
      if (!same) {
        found.emplace_back(bucket->index, static_cast<int64_t>(slot));
      }
    }
  }
  return found;
}

void BucketManager::mark_zeroed(int64_t bucket, int64_t slot) {
  const std::lock_guard lock(mutex_);
  buckets_.at(bucket)->slots.at(slot).zeroed = true;
}

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
  const GradsSeen seen = look_at_grads();  // may find a failure
  return {.place = place,
          .rounds = pass_.rounds,
          .own_rounds = pass_.own_rounds,
          .failed = !pass_.failure.empty(),
          .unsent = seen.unsent,
          .changed = seen.changed,
          .adoptions = adoptions,
          .scaled = seen.scaled,
          .proposes = !gathers_.order().proposed.empty()};
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
    holds_scaled_ = verdict.scaled.most > 0;
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
  pass_.rounds = pass_.own_rounds = pass_.gathered = 0;
  return Settled::ready;
}

// One look at all parameters, whose number is what a step of small ones costs.
GradsSeen BucketManager::look_at_grads() {
  GradsSeen seen;
  for (const auto& bucket : buckets_) {
    for (Slot& slot : bucket->slots) {
      const at::Tensor& grad = slot.param.grad();
      if (grad.defined() && !(slot.placeholder.defined() && grad.is_same(slot.placeholder))) {
        if (pass_.failure.empty()) pass_.failure = refusal_of(slot, options_.device);
        // Whole gradients are otherwise used as p.grad holds them: only what no_sync() kept back has to be averaged.
        seen.unsent |= !options_.whole_grads || (slot.unsent && exchange_ != nullptr);
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

void BucketManager::mark_scaled() {
  for (const auto& bucket : buckets_) {
    for (Slot& slot : bucket->slots) {
      slot.seen.scaled.note(slot.param.grad());
    }
  }
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
  std::vector<int64_t> order = order_.learned();
  if (pass_.own_rounds == 0 && !order.empty()) order[0] = -1;  // nothing to learn from
  order = agreement_.from_rank_0(std::move(order));
  if (!order.empty() && order[0] >= 0) order_.set_order(std::move(order));
}

void BucketManager::learn_gather_order() {
  GatherOrder& order = gathers_.order();
  order.agreed = agreement_.from_rank_0(std::move(order.proposed));
  order.proposed.clear();
}

std::vector<int64_t> BucketManager::gather_order() const {
  if (!gathers_.order().agreed.empty()) return gathers_.order().agreed;
  std::vector<int64_t> order(buckets_.size());
  std::iota(order.begin(), order.end(), 0);
  return order;
}

void BucketManager::zero(bool set_to_none) {
  bool others_wait = false;
  {
    const std::lock_guard lock(mutex_);
    others_wait = options_.whole_grads && exchange_ && pass_.open && *pass_.raised;
    flush_pass();
  }
  // Where gradients are whole the others are at the end of the backward that raised here: they must hear of it.
  if (others_wait) {
    ask("zero_grad()", [this] { abandon(agreement_.agree(statement(Place::backward_end, 0))); });
  }
  const std::lock_guard lock(mutex_);
  pass_.failure.clear();
  for (const auto& bucket : buckets_) {
    for (Slot& slot : bucket->slots) {
      at::Tensor& grad = slot.param.mutable_grad();
      // Since the last step every rank may hold something of this parameter, whether this one contributed or not.
      slot.replace |= slot.held || pass_.rounds > 0;
      const bool is_placeholder = grad.defined() && slot.placeholder.defined() && grad.is_same(slot.placeholder);
      if (set_to_none) {
        slot.held = slot.zeroed = false;
        slot.seen.local.forget();
        grad.reset();
      } else if (is_placeholder) {
        slot.zeroed = true;
      } else if (grad.defined()) {
        grad.detach_().zero_();
      }
    }
  }
  if (!set_to_none && !options_.whole_grads) return;
  flights_.after_landing([buckets = buckets_] {
    for (const auto& bucket : buckets) {
      Landed& landed = bucket->landed;
      landed.holds = false;
      landed.pieces.clear();
      if (!bucket->keeps_shard) landed.shard.reset();
      landed.words.reset();
      landed.present.zero_();
    }
  });
}

}  // namespace zx
