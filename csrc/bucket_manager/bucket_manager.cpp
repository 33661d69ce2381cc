#include "bucket_manager/bucket_manager.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "bucket_manager/packing.h"
#include "bucket_manager/ranges.h"
#include "bucket_manager/straight.h"
#include "check.h"

namespace zx {

BucketManager::BucketManager(std::shared_ptr<Exchange> exchange, Line control, ManagerOptions options)
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
  bucket->grad_dtype = spec.grad_dtype;
  bucket->shard_numel = spec.shard_numel;
  bucket->trailer_numel = spec.trailer_numel;
  bucket->segments = std::move(spec.segments);
  bucket->landed.keeps_shard = options_.keeps_shards;
  const bool straight = exchange_ ? exchange_->sends_messages() : stay_in_place(*bucket);
  if (straight) bucket->num_straight = spec.num_straight;
  if (bucket->landed.keeps_shard) {
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
                             .home = Home(slot.home),
                             .hooks = {}});
    bucket->slots.back().whole.unsent = options_.whole_grads && slot.param.grad().defined();
  }
  bucket->parts =
      parts_of(*bucket, rank(), flights_.most_in_a_part(static_cast<int64_t>(c10::elementSize(spec.wire_dtype))));
  buckets_.push_back(bucket);
  order_.add_bucket();
  gathers_.order() = {};
  for (Slot& slot : bucket->slots) install_hooks(*bucket, slot);
  return bucket->index;
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
      if (!bucket->slots[slot].home.has(bucket->slots[slot].param))
        found.emplace_back(bucket->index, static_cast<int64_t>(slot));
    }
  }
  return found;
}

int64_t BucketManager::num_slots() const {
  int64_t count = 0;
  for (const auto& bucket : buckets_) count += static_cast<int64_t>(bucket->slots.size());
  return count;
}

void BucketManager::bump_versions() {
  int64_t index = 0;
  for (const auto& bucket : buckets_) {
    for (const Slot& slot : bucket->slots) {
      if (settled_with_.with_grad.has(index++)) slot.param.unsafeGetTensorImpl()->bump_version();
    }
  }
}

void BucketManager::mark_zeroed(int64_t bucket, int64_t slot) {
  const std::lock_guard lock(mutex_);
  buckets_.at(bucket)->slots.at(slot).zeroed = true;
}

void BucketManager::mark_scaled() {
  for (const auto& bucket : buckets_) {
    for (Slot& slot : bucket->slots) {
      slot.seen.scaled.note(slot.param.grad());
    }
  }
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
      slot.whole.reached = false;
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
      if (!landed.keeps_shard) landed.shard.reset();
      landed.words.reset();
      landed.present.zero_();
    }
  });
}

}  // namespace zx
