// What happens on autograd's thread: a gradient is about to be accumulated, is ready, or backward is over.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "bucket_manager/bucket_manager.h"
#include "bucket_manager/other_reducers.h"
#include "bucket_manager/packing.h"

namespace zx {
namespace {

using torch::autograd::variable_list;

void refuse_compiled_autograd() {
  TORCH_CHECK(false,
              "zerox does not work under compiled autograd: run backward() outside torch._dynamo.compiled_autograd");
}

// AccumulateGrad would add into whatever p.grad is: a placeholder has to be out of its way.
class BeforeAccumulate final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeAccumulate(std::function<void()> body) : body_(std::move(body)) {}
  variable_list operator()(const variable_list& grads) override {
    body_();
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }

 private:
  std::function<void()> body_;
};

}  // namespace

// Hooks hold the manager weakly: the graph may outlive the optimizer.
void BucketManager::install_hooks(Bucket& bucket, Slot& slot) {
  slot.hooks.accumulator = torch::autograd::impl::grad_accumulator(slot.param);
  const std::weak_ptr<BucketManager> weak = weak_from_this();
  const int64_t bucket_index = bucket.index;
  const int64_t slot_index = &slot - bucket.slots.data();
  if (!options_.whole_grads) {
    auto hook = std::make_unique<BeforeAccumulate>([weak, bucket_index, slot_index] {
      if (const auto self = weak.lock()) self->before_accumulate(self->buckets_[bucket_index]->slots[slot_index]);
    });
    slot.hooks.before = hook.get();
    slot.hooks.accumulator->add_pre_hook(std::move(hook));
  }
  slot.hooks.after = slot.hooks.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [weak, bucket_index, slot_index](const variable_list& outputs, const variable_list& /*inputs*/) {
        if (const auto self = weak.lock()) {
          Bucket& bucket = *self->buckets_[bucket_index];
          self->after_accumulate(bucket, bucket.slots[slot_index]);
        }
        return outputs;
      },
      [](torch::dynamo::autograd::CompiledNodeArgs& /*args*/) { refuse_compiled_autograd(); }));
  add_own_hook(slot.hooks.after);
}

void BucketManager::remove_hooks(Slot& slot) {
  if (slot.hooks.accumulator == nullptr) return;
  remove_own_hook(slot.hooks.after);
  slot.hooks.accumulator->del_post_hook(slot.hooks.after);
  auto& pre_hooks = slot.hooks.accumulator->pre_hooks();
  std::erase_if(pre_hooks, [&slot](const auto& hook) { return hook.get() == slot.hooks.before; });
}

// See Note [Who holds a gradient].
void BucketManager::before_accumulate(Slot& slot) {
  const std::lock_guard lock(mutex_);
  at::Tensor& grad = slot.param.mutable_grad();
  if (!grad.defined()) {
    slot.replace |= slot.held;
    slot.held = false;
  } else if (grad.is_same(slot.placeholder)) {
    slot.replace |= slot.zeroed;
    slot.zeroed = false;
    grad.reset();
  } else {
    slot.replace |= !slot.seen.local.is(grad);
  }
}

void BucketManager::after_accumulate(Bucket& bucket, Slot& slot) {
  if (options_.whole_grads && !exchange_) {  // p.grad is the mean as autograd leaves it
    ++num_seen_;
    return;
  }
  const std::lock_guard lock(mutex_);
  const at::Tensor& grad = slot.param.grad();
  if (!grad.defined()) return;  // a hook of the user's took it away
  TORCH_CHECK(grad.layout() == at::kStrided, "zerox: ", refusal_of(slot, options_.device));
  slot.seen.local.note(grad);
  note_producer(bucket);
  slot.whole.unsent = !sync_;
  if (!sync_) return;
  open_pass();
  TORCH_CHECK(!slot.fired, "zerox: parameter '", slot.name,
              "' got a second gradient in one backward. A parameter shared by two reentrant checkpoints does this: "
              "pass use_reentrant=False to torch.utils.checkpoint. After a backward inside which some parameter got "
              "none, call optimizer.synchronize() before the next one");
  slot.fired = true;
  for (const int64_t launch : order_.mark(bucket.index)) release(launch, /*empty=*/false);
}

// See Note [Other reducers].
void BucketManager::refuse_other_reducers() {
  const auto refuse = [](const std::string& name) {
    TORCH_CHECK(false, "zerox: the gradient of parameter '", name,
                "' is reduced twice, here and in a DistributedDataParallel or another zerox optimizer; zerox averages "
                "gradients itself: train the model without DistributedDataParallel, and give each parameter to one "
                "optimizer");
  };
  HookedByOthers hooked;
  std::vector<const Slot*> slots;
  for (const auto& bucket : buckets_) {
    for (const Slot& slot : bucket->slots) {
      int64_t count = 0;
      for (const auto& hook : slot.hooks.accumulator->post_hooks()) {
        const auto key = reinterpret_cast<uintptr_t>(hook.get());
        if (key == slot.hooks.after) continue;
        if (dynamic_cast<torch::autograd::utils::LambdaPostHook*>(hook.get()) == nullptr) continue;
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

void BucketManager::open_pass() {
  TORCH_CHECK(!pass_.open || !*pass_.raised,
              "zerox: the backward before this one raised an exception; call "
              "optimizer.zero_grad() before the next backward");
  if (!pass_.open) {
    refuse_other_reducers();
    pass_.open = true;
    pass_.last_task = -1;
    pass_.raised = std::make_shared<bool>(false);
    std::vector<int64_t> pending;
    for (const auto& bucket : buckets_) {
      pending.push_back(0);
      for (Slot& slot : bucket->slots) {
        slot.fired = false;
        pending.back() += slot.param.requires_grad() ? 1 : 0;
      }
    }
    order_.begin(std::move(pending));
  }
  const int64_t task = torch::autograd::get_current_graph_task_id();
  if (task == -1 || task == pass_.last_task) return;
  pass_.last_task = task;
  auto token = std::make_shared<EndToken>(pass_.raised);
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), token] {
    token->used = true;
    if (const auto self = weak.lock()) self->on_backward_end();
  });
}

void BucketManager::on_backward_end() {
  {
    const std::lock_guard lock(mutex_);
    if (!pass_.open) return;  // an inner task ended the pass
    const bool nested = torch::autograd::get_current_node() != nullptr;
    if (nested && !order_.complete()) return;
    finish_pass(/*own=*/true, /*empty=*/false);
  }
  if (options_.whole_grads) settle(Place::backward_end, 0);
}

// The rest leaves. See Note [Buckets launch in one order].
void BucketManager::finish_pass(bool own, bool empty) {
  for (const int64_t bucket : order_.finish()) release(bucket, empty);
  pass_.open = false;
  ++pass_.rounds;
  pass_.own_rounds += own ? 1 : 0;
}

// The optimizer is called while a pass is open: its end could not be seen, or never came because backward raised.
void BucketManager::flush_pass() {
  if (!pass_.open) return;
  const bool raised = *pass_.raised;
  finish_pass(/*own=*/true, /*empty=*/raised);
  if (raised) pass_.failure = "its backward raised an exception";
}

}  // namespace zx
