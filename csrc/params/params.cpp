#include "params/params.h"

#include <numeric>

#include "exchange/two_level_exchange.h"

namespace zx {

Params::Params(std::shared_ptr<Buckets> buckets, std::shared_ptr<Exchanges> exchanges)
    : buckets_(std::move(buckets)),
      exchanges_(std::move(exchanges)),
      gathers_({"the updated parameters", "gather", "gather_wait"}) {}

void Params::start_gather(int64_t bucket, bool background) {
  const auto& started = buckets_->all.at(bucket);
  gathers_.start(started, started->flat, started->shards.starts(), *exchanges_->at(started->subgroup.exchange),
                 background);
}

void Params::start_gather_of(int64_t bucket, const at::Tensor& part) {
  const auto& started = buckets_->all.at(bucket);
  Exchange& outer = *exchanges_->front();
  const at::IntArrayRef starts =
      starts_in_column(started->shards.starts(), started->subgroup.rank / outer.world(), outer.world());
  gathers_.start(started, part, starts, outer, /*background=*/false);
}

void Params::forget_order() {
  proposed_.clear();
  agreed_.clear();
}

std::vector<int64_t> Params::order() const {
  if (!agreed_.empty()) return agreed_;
  // Forward's, if modules are used in the order of registration: the buckets' own is the reverse of it. Backward has
  // written these gradients last, so they are still in a CPU's caches.
  std::vector<int64_t> order(buckets_->all.size());
  std::iota(order.rbegin(), order.rend(), 0);
  return order;
}

std::vector<std::pair<int64_t, int64_t>> Params::moved() const {
  std::vector<std::pair<int64_t, int64_t>> found;
  for (const auto& bucket : buckets_->all) {
    for (size_t slot = 0; slot < bucket->slots.size(); ++slot) {
      if (!bucket->slots[slot].home.has_param()) found.emplace_back(bucket->index, static_cast<int64_t>(slot));
    }
  }
  return found;
}

}  // namespace zx
