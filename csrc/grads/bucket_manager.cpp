#include "grads/bucket_manager.h"

#include <ATen/ops/zeros.h>

#include <limits>
#include <utility>

#include "exchange/two_level_exchange.h"
#include "grads/two_level.h"
#include "grads/zero_copy.h"

namespace zx {

namespace {

std::shared_ptr<Exchange> exchange_over(const BucketManager::Axes& axes) {
  if (axes.size() == 1) return axes[0];
  TORCH_CHECK(axes.size() == 2, "zerox: ranks are on a mesh of 1 or 2 axes, got ", axes.size());
  return std::make_shared<TwoLevelExchange>(axes[0], axes[1]);
}

void check_shards(const BucketSpec& spec, const Exchange& exchange) {
  TORCH_CHECK_VALUE(spec.shards.are_equal() || exchange.takes_unequal(), "zerox: parameter '", spec.slots.front().name,
                    "' and others of its bucket must each lie whole on one rank, so the ranks' shards differ in "
                    "length, and the backend's own collectives move equal ones: pass exchange=\"direct\", without "
                    "ZEROX_EXCHANGE=native");
}

}  // namespace

// What moves gradients does not ask whether there are other ranks, or axes: each is made here for one case.
BucketManager::BucketManager(const Axes& axes, const Communicator& control, const ManagerOptions& options)
    : buckets_(std::make_shared<Buckets>()),
      keeps_shards_(options.keeps_shards),
      homes_move_(options.sharded_params && !options.device.is_cpu()),
      exchanges_(std::make_shared<Exchanges>(Exchanges{exchange_over(axes)})),
      reductions_(std::make_shared<ReductionsOfSubgroups>()) {
  const std::shared_ptr<Exchange> exchange = exchanges_->front();
  const bool alone = !exchange->has_group();
  reductions_->add(axes.size() > 1 ? make_two_level_reduction(axes[0], axes[1]) : make_reduction(exchange));
  flights_ = std::make_shared<Flights>(reductions_, options.device, exchange->waits_on_host());
  const bool kept_in_parts = axes.size() > 1 && options.sharded_params;  // see Note [Shards are pulled]
  params_ =
      std::make_shared<Params>(buckets_, kept_in_parts ? std::make_shared<Exchanges>(Exchanges{axes[1]}) : exchanges_);
  grads_ = make_mean_grads(options.route, alone && !options.divides, {buckets_, exchanges_, flights_});
  backward_ = std::make_shared<Backward>(buckets_, grads_, flights_, /*paced=*/options.sharded_params);
  synchronizer_ = std::make_shared<Synchronizer>(control, buckets_, grads_, backward_, flights_, params_);
  backward_->set_on_end([weak = std::weak_ptr(synchronizer_)] {
    if (const auto synchronizer = weak.lock()) synchronizer->end_backward();
  });
}

int64_t BucketManager::add_subgroup(std::shared_ptr<Exchange> exchange) {
  exchanges_->push_back(exchange);
  reductions_->add(make_reduction(std::move(exchange)));
  return static_cast<int64_t>(exchanges_->size()) - 1;
}

int64_t BucketManager::add_bucket(BucketSpec spec) {
  check_shards(spec, *exchanges_->at(spec.subgroup.exchange));
  auto bucket = std::make_shared<Bucket>();
  bucket->index = static_cast<int64_t>(buckets_->all.size());
  bucket->flat = std::move(spec.flat);
  bucket->subgroup = spec.subgroup;
  bucket->wire_dtype = spec.wire_dtype;
  bucket->grad_dtype = spec.grad_dtype;
  bucket->shards = std::move(spec.shards);
  bucket->own.segments = std::move(spec.segments);
  ReducedShard& reduced = bucket->reduced;
  reduced.divisor = spec.divisor;
  reduced.keeps_shard = keeps_shards_;
  if (reduced.keeps_shard) {
    reduced.shard = at::zeros({bucket->own_numel()}, bucket->flat.options().dtype(bucket->wire_dtype));
  }
  const auto bytes = bucket->own.segments.options().dtype(at::kByte);
  reduced.present = at::zeros({bucket->own.segments.size(0)}, bytes);
  reduced.replaced = at::zeros({bucket->own.segments.size(0)}, bytes);
  for (SlotSpec& slot : spec.slots) {
    const bool is_dtensor = !slot.local.is_same(slot.param);
    buckets_->num_dtensors += is_dtensor ? 1 : 0;
    bucket->slots.push_back({.param = slot.param,
                             .placeholder = slot.placeholder,
                             .offset = slot.offset,
                             .home = Home(slot.home, slot.local, is_dtensor, homes_move_),
                             .name = std::move(slot.name)});
    bucket->slots.back().whole.unsent = slot.param.grad().defined();
  }
  const Reduction& reduction = flights_->reduction();
  if (reduction.takes_zero_copy(*bucket)) {
    bucket->num_zero_copy = spec.num_zero_copy;
    bucket->shards.set_zero_copy(std::move(spec.zero_copy_numels));
  }
  bucket->own.parts = parts_of(*bucket, bucket->subgroup.rank, reduction.most_in_a_part(*bucket));
  backward_->add(bucket);
  params_->forget_order();
  return bucket->index;
}

std::vector<Part> BucketManager::parts(int64_t index) const {
  const Bucket& bucket = buckets_->at(index);
  return parts_of(bucket, bucket.subgroup.rank, std::numeric_limits<int64_t>::max());
}

}  // namespace zx
