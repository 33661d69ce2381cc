#include "grads/grad_hooks.h"

#include <functional>
#include <utility>
#include <vector>

#include "check.h"
#include "grads/named_errors.h"
#include "grads/other_reducers.h"

namespace zx {
namespace {

using internals::variable_list;

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

void GradHooks::install(Bucket& bucket, std::weak_ptr<Listener> listener) {
  listener_ = std::move(listener);
  for (Slot& slot : bucket.slots) {
    hang(bucket, slot, internals::accumulator_of(slot.param));
    watch(bucket, slot);
  }
}

void GradHooks::hang(const Bucket& bucket, Slot& slot, internals::AccumulatorNode node) {
  slot.hooks.accumulator = std::move(node);
  const int64_t bucket_index = bucket.index;
  const int64_t slot_index = &slot - bucket.slots.data();
  if (grads_->precedes_accumulation(bucket)) {
    auto hook = std::make_unique<BeforeAccumulate>([this, weak = listener_, bucket_index, slot_index] {
      if (const auto listener = weak.lock()) {
        Bucket& bucket = buckets_->at(bucket_index);
        listener->before_accumulate(bucket, bucket.slots[slot_index]);
      }
    });
    slot.hooks.before = hook.get();
    slot.hooks.accumulator->add_pre_hook(std::move(hook));
  }
  slot.hooks.after = slot.hooks.accumulator->add_post_hook(
      internals::eager_post_hook([this, weak = listener_, bucket_index, slot_index](const variable_list& outputs,
                                                                                    const variable_list& /*inputs*/) {
        if (const auto listener = weak.lock()) {
          Bucket& bucket = buckets_->at(bucket_index);
          naming_params(*buckets_, [&] { listener->after_accumulate(bucket, bucket.slots[slot_index]); });
        }
        return outputs;
      }));
  add_own_hook(slot.hooks.after);
  if (slot.hooks.watch != nullptr) slot.hooks.watch->node = slot.hooks.accumulator.get();
}

void GradHooks::unhang(Slot& slot) {
  remove_own_hook(slot.hooks.after);
  slot.hooks.accumulator->del_post_hook(slot.hooks.after);
  auto& pre_hooks = slot.hooks.accumulator->pre_hooks();
  std::erase_if(pre_hooks, [&slot](const auto& hook) { return hook.get() == slot.hooks.before; });
}

void GradHooks::remove(Slot& slot) {
  if (slot.hooks.accumulator == nullptr) return;
  unhang(slot);
  if (slot.hooks.watch == nullptr || slot.hooks.watch->is_gone) return;
  std::erase_if(internals::hooks_of(slot.param),
                [hook = slot.hooks.watch->hook](const auto& each) { return each.get() == hook; });
}

void GradHooks::watch(const Bucket& bucket, Slot& slot) {
  const int64_t bucket_index = bucket.index;
  const int64_t slot_index = &slot - bucket.slots.data();
  slot.hooks.watch = std::make_shared<Watch>();
  slot.hooks.watch->node = slot.hooks.accumulator.get();
  internals::hooks_of(slot.param)
      .push_back(std::make_unique<WatchHook>(
          slot.hooks.watch,
          [this, weak = listener_, bucket_index, slot_index] {
            if (const auto listener = weak.lock()) {
              Bucket& bucket = buckets_->at(bucket_index);
              on_new_node(bucket, bucket.slots[slot_index]);
            }
          },
          [this, weak = listener_] {
            if (const auto listener = weak.lock()) buckets_->is_unwatched = true;
          }));
}

void GradHooks::on_new_node(const Bucket& bucket, Slot& slot) {
  const Locked lock(buckets_->mutex);
  auto node = internals::current_node();
  if (node == slot.hooks.accumulator) return;  // another thread was first
  unhang(slot);
  hang(bucket, slot, std::move(node));
}

std::string GradHooks::restore_watches() {
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
        unhang(slot);
        hang(*bucket, slot, std::move(node));
      }
    }
  }
  return refusal;
}

void GradHooks::refuse_other_reducers() const {
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

bool GradHooks::is_about_to_accumulate() const {
  const auto* exec_info = internals::current_exec_info();
  if (exec_info == nullptr || exec_info->empty()) return true;
  bool found = false;
  buckets_->for_each_slot([&](const Slot& slot, int64_t /*position*/) {
    const auto info = exec_info->find(slot.hooks.accumulator.get());
    found = found || (info != exec_info->end() && info->second.should_execute() && !info->second.captures_);
  });
  return found;
}

}  // namespace zx
