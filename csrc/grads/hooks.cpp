// On autograd's threads: a gradient is about to be accumulated, a gradient is ready, or backward is over.
#include <algorithm>
#include <utility>
#include <vector>

#include "grads/backward.h"
#include "grads/local_grad.h"
#include "grads/named_errors.h"
#include "torch_internals.h"

namespace zx {

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
  if (!note_gradient(bucket, slot)) return;
  const WaitEnd awaited = pace_.await();
  const Locked lock(buckets_->mutex);
  pace_.note(awaited);
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
  progress_.note_kept(keeps);
  grads_->accumulated(slot, sync_ && !keeps, lock);
  if (!sync_ || keeps) return false;
  open_pass(lock);
  await_end(lock);
  pass_.note(slot.hooks.decision);
  if (!is_last_gradient(slot)) return false;
  const std::vector<int64_t> launched = order_.mark(bucket.index);
  for (const int64_t index : launched) launch(index, /*empty=*/false, lock);
  return pace_.is_kept_now() && !launched.empty();
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

void Backward::begin(const std::shared_ptr<Decision>& decision, bool accumulates, bool inside) {
  if (!grads_->sends()) return;
  const Locked lock(buckets_->mutex);
  if (!sync_ || decision->keeps() || !(accumulates || hooks_.is_about_to_accumulate())) return;
  open_pass(lock);
  await_end(lock);
  if (inside) pass_.whole_task = pass_.last_task;
  pass_.note(decision);
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
