// The hooks on autograd's threads: a gradient is about to be accumulated, a gradient is ready, or backward is over.
#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "grads/backward.h"
#include "grads/local_grad.h"
#include "grads/named_errors.h"
#include "grads/other_reducers.h"
#include "torch_internals.h"

namespace zx {
namespace {

using internals::variable_list;

// See Note [Backward at the pace of the exchange].
constexpr int64_t kMostUnreduced = 1;
constexpr std::chrono::milliseconds kPatience{2000};

// See Note [Hooks follow the parameter].
class WatchHook final : public internals::EagerPreHook {
 public:
  WatchHook(std::shared_ptr<Watch> watch, std::function<void()> on_new_node, std::function<void()> on_gone)
      : watch_(std::move(watch)), on_new_node_(std::move(on_new_node)), on_gone_(std::move(on_gone)) {
    watch_->hook = this;
  }
  WatchHook(const WatchHook&) = delete;
  WatchHook& operator=(const WatchHook&) = delete;
  ~WatchHook() override {
    watch_->is_gone = true;
    on_gone_();
  }
  variable_list operator()(const variable_list& grads) override {
    const auto node = internals::current_node();
    if (node != nullptr && node.get() != watch_->node) on_new_node_();
    return grads;
  }

 private:
  std::shared_ptr<Watch> watch_;
  std::function<void()> on_new_node_;
  std::function<void()> on_gone_;
};

// AccumulateGrad would add to p.grad whatever it is, so a placeholder has to be moved out of its way.
class BeforeAccumulate final : public internals::EagerPreHook {
 public:
  explicit BeforeAccumulate(std::function<void()> body) : body_(std::move(body)) {}
  variable_list operator()(const variable_list& grads) override {
    body_();
    return grads;
  }

 private:
  std::function<void()> body_;
};

}  // namespace

// Hooks hold this object weakly: the graph may outlive the optimizer.
void Backward::install_hooks(const Bucket& bucket, Slot& slot) {
  hang_hooks(bucket, slot, internals::accumulator_of(slot.param));
  watch(bucket, slot);
}

void Backward::hang_hooks(const Bucket& bucket, Slot& slot, internals::AccumulatorNode node) {
  slot.hooks.accumulator = std::move(node);
  const std::weak_ptr<Backward> weak = weak_from_this();
  const int64_t bucket_index = bucket.index;
  const int64_t slot_index = &slot - bucket.slots.data();
  if (grads_->precedes_accumulation(bucket)) {
    auto hook = std::make_unique<BeforeAccumulate>([weak, bucket_index, slot_index] {
      if (const auto self = weak.lock()) {
        Bucket& bucket = self->buckets_->at(bucket_index);
        self->before_accumulate(bucket, bucket.slots[slot_index]);
      }
    });
    slot.hooks.before = hook.get();
    slot.hooks.accumulator->add_pre_hook(std::move(hook));
  }
  slot.hooks.after = slot.hooks.accumulator->add_post_hook(internals::eager_post_hook(
      [weak, bucket_index, slot_index](const variable_list& outputs, const variable_list& /*inputs*/) {
        if (const auto self = weak.lock()) {
          Bucket& bucket = self->buckets_->at(bucket_index);
          naming_params(*self->buckets_, [&] { self->after_accumulate(bucket, bucket.slots[slot_index]); });
        }
        return outputs;
      }));
  add_own_hook(slot.hooks.after);
  if (slot.hooks.watch != nullptr) slot.hooks.watch->node = slot.hooks.accumulator.get();
}

void Backward::unhang_hooks(Slot& slot) {
  remove_own_hook(slot.hooks.after);
  slot.hooks.accumulator->del_post_hook(slot.hooks.after);
  auto& pre_hooks = slot.hooks.accumulator->pre_hooks();
  std::erase_if(pre_hooks, [&slot](const auto& hook) { return hook.get() == slot.hooks.before; });
}

void Backward::remove_hooks(Slot& slot) {
  if (slot.hooks.accumulator == nullptr) return;
  unhang_hooks(slot);
  if (slot.hooks.watch == nullptr || slot.hooks.watch->is_gone) return;
  std::erase_if(internals::hooks_of(slot.param),
                [hook = slot.hooks.watch->hook](const auto& each) { return each.get() == hook; });
}

void Backward::watch(const Bucket& bucket, Slot& slot) {
  const std::weak_ptr<Backward> weak = weak_from_this();
  const int64_t bucket_index = bucket.index;
  const int64_t slot_index = &slot - bucket.slots.data();
  slot.hooks.watch = std::make_shared<Watch>();
  slot.hooks.watch->node = slot.hooks.accumulator.get();
  internals::hooks_of(slot.param)
      .push_back(std::make_unique<WatchHook>(
          slot.hooks.watch,
          [weak, bucket_index, slot_index] {
            if (const auto self = weak.lock()) {
              const Bucket& bucket = self->buckets_->at(bucket_index);
              self->on_new_node(bucket, self->buckets_->at(bucket_index).slots[slot_index]);
            }
          },
          [weak] {
            if (const auto self = weak.lock()) self->buckets_->is_unwatched = true;
          }));
}

void Backward::on_new_node(const Bucket& bucket, Slot& slot) {
  const Locked lock(buckets_->mutex);
  auto node = internals::current_node();
  if (node == slot.hooks.accumulator) return;  // another thread was first
  unhang_hooks(slot);
  hang_hooks(bucket, slot, std::move(node));
}

std::string Backward::restore_watches() {
  std::string refusal;
  if (!buckets_->is_unwatched.exchange(false)) return refusal;
  const Locked lock(buckets_->mutex);
  for (const auto& bucket : buckets_->all) {
    for (Slot& slot : bucket->slots) {
      if (!slot.hooks.watch->is_gone) continue;
      watch(*bucket, slot);
      if (internals::known_accumulator_of(slot.param) == slot.hooks.accumulator) continue;
      // A node that is there now, or that was there in between, may have accumulated.
      if (refusal.empty() && grads_->may_be_unseen(slot)) {
        refusal = "parameter '" + slot.name +
                  "' was given another dtype or device (model.half().float() does it) after its first "
                  "register_hook(), so that its gradient was not averaged; it is from the next backward on";
      }
      if (auto node = internals::accumulator_of(slot.param)) {
        unhang_hooks(slot);
        hang_hooks(*bucket, slot, std::move(node));
      }
    }
  }
  return refusal;
}

void Backward::before_accumulate(const Bucket& bucket, Slot& slot) {
  before_next_.call();
  const Locked lock(buckets_->mutex);
  // A thread that comes while another one accumulates finds what the other one left.
  if (slot.seen.writers++ == 0) grads_->before_accumulate(bucket, slot, lock);
}

void Backward::after_accumulate(Bucket& bucket, Slot& slot) {
  if (!grads_->sends()) {
    grads_->count_gradient();
    return;
  }
  if (note_gradient(bucket, slot)) keep_pace();
}

// Returns whether to wait for what is under way: see Note [Backward at the pace of the exchange].
bool Backward::note_gradient(Bucket& bucket, Slot& slot) {
  const Locked lock(buckets_->mutex);
  if (slot.seen.writers > 0) --slot.seen.writers;
  const at::Tensor& grad = slot.param.grad();
  if (!grad.defined()) return false;  // a hook of the user's removed it
  TORCH_CHECK(grad.layout() == at::kStrided, "zerox: ", local_grad(slot).refusal);
  slot.seen.local.note(grad);
  packing_.note_producer(bucket, lock);
  const bool keeps = slot.hooks.decision != nullptr && slot.hooks.decision->keeps();
  progress_.rounds.has_kept |= keeps;
  grads_->accumulated(slot, sync_ && !keeps, lock);
  if (!sync_ || keeps) return false;
  open_pass(lock);
  await_end(lock);
  pass_.note(slot.hooks.decision);
  if (!is_last_gradient(slot)) return false;
  const std::vector<int64_t> launched = order_.mark(bucket.index);
  for (const int64_t index : launched) launch(index, /*empty=*/false, lock);
  return pass_.paced && !launched.empty();
}

// Whether a slot waits for no more gradients in this backward. See Note [Several gradients in one backward].
bool Backward::is_last_gradient(Slot& slot) {
  ++slot.fired.count;
  if (!is_static(slot.hooks.decision)) {
    TORCH_CHECK(slot.fired.count == 1, "zerox: parameter '", slot.name,
                "' got a second gradient in one backward. A parameter shared by two reentrant checkpoints does this: "
                "pass use_reentrant=False to torch.utils.checkpoint, or static_graph=True to "
                "zerox.DistributedDataParallel. After a backward inside which some parameter got none, call "
                "optimizer.synchronize() before the next one");
    return true;
  }
  pass_.is_static = true;
  if (!grads_->leaves_in_place()) {
    pass_.again |= slot.fired.count > std::max(1, slot.fired.awaited);
    return slot.fired.count == std::max(1, slot.fired.awaited);
  }
  if (slot.fired.awaited == 0) {
    order_.hold();
    return slot.fired.count == 1;
  }
  TORCH_CHECK(slot.fired.count <= slot.fired.awaited, "zerox: parameter '", slot.name, "' got ", slot.fired.count,
              " gradients in one backward, and at most ", slot.fired.awaited,
              " in those before: with static_graph=True every backward must have the same graph. Pass "
              "use_reentrant=False to torch.utils.checkpoint, and leave static_graph out");
  return slot.fired.count == slot.fired.awaited;
}

void Backward::keep_pace() {
  if (flights_->await_all_but(kMostUnreduced, kPatience)) return;
  const Locked lock(buckets_->mutex);
  pass_.paced = false;
}

// See Note [Other reducers].
void Backward::refuse_other_reducers() const {
  const auto refuse = [](const std::string& name) {
    TORCH_CHECK(false, "zerox: the gradient of parameter '", name,
                "' is reduced twice, here and in a DistributedDataParallel or another zerox optimizer; zerox averages "
                "gradients itself: train the model without DistributedDataParallel, and give each parameter to one "
                "optimizer");
  };
  HookedByOthers hooked;
  std::vector<const Slot*> slots;
  for (const auto& bucket : buckets_->all) {
    for (const Slot& slot : bucket->slots) {
      int64_t count = 0;
      for (const auto& hook : slot.hooks.accumulator->post_hooks()) {
        const auto key = reinterpret_cast<uintptr_t>(hook.get());
        if (key == slot.hooks.after) continue;
        if (!internals::may_send_gradients(hook.get())) continue;
        if (is_own_hook(key)) refuse(slot.name);
        ++count;
      }
      if (count == 0) continue;
      hooked.params.push_back(slot.param);
      hooked.counts.push_back(count);
      slots.push_back(&slot);
    }
  }
  const int64_t reduced = find_reduced(hooked);
  if (reduced >= 0) refuse(slots[reduced]->name);
}

void Backward::begin(const std::shared_ptr<Decision>& decision, bool accumulates, bool inside) {
  const Locked lock(buckets_->mutex);
  if (!sync_ || decision->keeps() || !(accumulates || is_about_to_accumulate())) return;
  open_pass(lock);
  await_end(lock);
  if (inside) pass_.whole_task = pass_.last_task;
  pass_.note(decision);
}

// Whether the graph task that this thread is in computes gradients for p.grad of any slot, or of everything. Not for
// torch.autograd.grad().
bool Backward::is_about_to_accumulate() const {
  const auto* exec_info = internals::current_exec_info();
  if (exec_info == nullptr || exec_info->empty()) return true;
  bool found = false;
  buckets_->for_each_slot([&](const Slot& slot, int64_t /*position*/) {
    const auto info = exec_info->find(slot.hooks.accumulator.get());
    found = found || (info != exec_info->end() && info->second.should_execute() && !info->second.captures_);
  });
  return found;
}

// See Note [How a backward ends].
void Backward::await_end(const Locked& /*lock*/) {
  const int64_t task = internals::current_graph_task();
  if (task == -1 || task == pass_.last_task) return;
  pass_.last_task = task;
  if (pass_.first_task == -1) pass_.first_task = task;
  auto token = std::make_shared<EndToken>(pass_.raised);
  internals::at_end_of_backward([weak = weak_from_this(), token, task] {
    token->used = true;
    if (const auto self = weak.lock()) naming_params(*self->buckets_, [&] { self->on_backward_end(task); });
  });
}

void Backward::on_backward_end(int64_t task) {
  {
    const Locked lock(buckets_->mutex);
    if (!pass_.open) return;  // an inner task ended the pass
    const bool nested = internals::current_node() != nullptr;
    constexpr int64_t kOver = -2;
    if (pass_.first_task == task) pass_.first_task = kOver;
    const bool is_whole = pass_.whole_task == task;
    if (nested && !is_whole && (pass_.first_task != kOver || !order_.complete())) return;
    finish_pass(/*own=*/true, /*empty=*/false, lock);
  }
  if (grads_->syncs_after_backward()) on_end_();
}

}  // namespace zx
