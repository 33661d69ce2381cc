// The parameters' side: where they lie, and the gathers that make them whole again after an update.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "buckets/buckets.h"
#include "exchange/exchange.h"
#include "params/gathers.h"

namespace zx {

// See Note [Locks].
class Params {
 public:
  Params(std::shared_ptr<Buckets> buckets, std::shared_ptr<Exchanges> exchanges);

  // Starts sending this rank's updated parameters of a bucket to all others. All ranks must start buckets in the same
  // order.
  void start_gather(int64_t bucket, bool background);
  // The same with this rank's slice of `part`, which the ranks of the exchange keep together: see Note [Shards are
  // pulled].
  void start_gather_of(int64_t bucket, const at::Tensor& part);
  Gathers& gathers() { return gathers_; }

  // The order in which forward needs buckets. When every rank has proposed one, rank 0's is agreed.
  void propose_order(std::vector<int64_t> buckets) { proposed_ = std::move(buckets); }
  bool proposes_order() const { return !proposed_.empty(); }
  std::vector<int64_t> take_proposal() { return std::exchange(proposed_, {}); }
  void set_order(std::vector<int64_t> agreed) { agreed_ = std::move(agreed); }
  // Buckets were added: no order is agreed any more.
  void forget_order();
  std::vector<int64_t> order() const;  // the agreed one, else the reverse of the buckets' own

  // (bucket, slot) of each parameter that does not lie at home.
  std::vector<std::pair<int64_t, int64_t>> moved() const;

 private:
  std::shared_ptr<Buckets> buckets_;
  std::shared_ptr<Exchanges> exchanges_;
  std::vector<int64_t> proposed_;  // by this rank; empty once agreed
  std::vector<int64_t> agreed_;
  Gathers gathers_;
};

}  // namespace zx
