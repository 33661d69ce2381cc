// The hooks on autograd's threads: a gradient is about to be accumulated, a gradient is ready, or backward is over.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <chrono>
#include <vector>

#include "grads/backward.h"
#include "grads/local_grad.h"
#include "grads/other_reducers.h"

namespace zx {
namespace {

using torch::autograd::variable_list;

// See Note [Backward at the pace of the exchange].
constexpr int64_t kMostUnlanded = 1;
constexpr std::chrono::milliseconds kPatience{2000};

void refuse_compiled_autograd() {
  TORCH_CHECK(false,
              "zerox does not work under compiled autograd: run backward() outside torch._dynamo.compiled_autograd");
}

// AccumulateGrad would add to p.grad whatever it is, so a placeholder has to be moved out of its way.
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

// Hooks hold this object weakly: the graph may outlive the optimizer.
void Backward::install_hooks(Bucket& bucket, Slot& slot) {
  slot.hooks.accumulator = torch::autograd::impl::grad_accumulator(slot.param);
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
  slot.hooks.after = slot.hooks.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [weak, bucket_index, slot_index](const variable_list& outputs, const variable_list& /*inputs*/) {
        if (const auto self = weak.lock()) {
          Bucket& bucket = self->buckets_->at(bucket_index);
          self->after_accumulate(bucket, bucket.slots[slot_index]);
        }
        return outputs;
      },
      [](torch::dynamo::autograd::CompiledNodeArgs& /*args*/) { refuse_compiled_autograd(); }));
  add_own_hook(slot.hooks.after);
}

void Backward::remove_hooks(Slot& slot) {
  if (slot.hooks.accumulator == nullptr) return;
  remove_own_hook(slot.hooks.after);
  slot.hooks.accumulator->del_post_hook(slot.hooks.after);
  auto& pre_hooks = slot.hooks.accumulator->pre_hooks();
  std::erase_if(pre_hooks, [&slot](const auto& hook) { return hook.get() == slot.hooks.before; });
}

void Backward::before_accumulate(const Bucket& bucket, Slot& slot) {
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
  grads_->accumulated(slot, sync_, lock);
  if (!sync_) return false;
  open_pass(lock);
  await_end(lock);
  TORCH_CHECK(!slot.fired, "zerox: parameter '", slot.name,
              "' got a second gradient in one backward. A parameter shared by two reentrant checkpoints does this: "
              "pass use_reentrant=False to torch.utils.checkpoint. After a backward inside which some parameter got "
              "none, call optimizer.synchronize() before the next one");
  slot.fired = true;
  const std::vector<int64_t> launched = order_.mark(bucket.index);
  for (const int64_t index : launched) launch(index, /*empty=*/false, lock);
  return pass_.paced && !launched.empty();
}

void Backward::keep_pace() {
  if (flights_->await_all_but(kMostUnlanded, kPatience)) return;
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

// See Note [How a backward ends].
void Backward::await_end(const Locked& /*lock*/) {
  const int64_t task = torch::autograd::get_current_graph_task_id();
  if (task == -1 || task == pass_.last_task) return;
  pass_.last_task = task;
  auto token = std::make_shared<EndToken>(pass_.raised);
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), token] {
    token->used = true;
    if (const auto self = weak.lock()) self->on_backward_end();
  });
}

void Backward::on_backward_end() {
  {
    const Locked lock(buckets_->mutex);
    if (!pass_.open) return;  // an inner task ended the pass
    const bool nested = torch::autograd::get_current_node() != nullptr;
    if (nested && !order_.complete()) return;
    finish_pass(/*own=*/true, /*empty=*/false, lock);
  }
  if (grads_->meets_after_backward()) on_end_();
}

}  // namespace zx
