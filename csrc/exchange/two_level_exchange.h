// Ranks on a mesh of two axes, of which the inner one is fast (ranks of one machine) and the outer one slow.
#pragma once

#include <memory>
#include <vector>

#include "exchange/exchange.h"

namespace zx {

// Note [Two levels]
// With G ranks on the inner axis and N on the outer one, each rank owns one of N * G slices. The ranks (., g) own
// slices g * N .. g * N + N - 1, which lie together:
//
//   slice      0      1   ...  N - 1  |  N  ...
//   owner    (0,0)  (1,0)     (N-1,0) | (0,1) ...
//
// Gradients first go to the rank of this column of owners: rank (n, h) sends N slices to each rank (n, g) of its inner
// axis, who adds up G of them, and sends N - 1 sums along the outer axis: 1/G of what a flat exchange would send there.
// Parameters take the way back. Sums between the levels are not rounded to the wire's dtype (csrc/grads/two_level.cpp).
// Where each column of owners begins, and where the last one ends: every N-th of the slices' `starts`.
std::vector<int64_t> starts_of_columns(at::IntArrayRef starts, int64_t outer_world);
// Where the slices of one column begin, and where they end.
at::IntArrayRef starts_in_column(at::IntArrayRef starts, int64_t column, int64_t outer_world);

class TwoLevelExchange final : public Exchange {
 public:
  TwoLevelExchange(std::shared_ptr<Exchange> inner, std::shared_ptr<Exchange> outer);
  ~TwoLevelExchange() override;

  bool waits_on_host() const override { return inner_->waits_on_host() || outer_->waits_on_host(); }
  std::vector<const Traffic*> traffic() const override;

  bool takes_unequal() const override { return inner_->takes_unequal() && outer_->takes_unequal(); }
  std::shared_ptr<Pending> gather(const at::Tensor& flat, at::IntArrayRef starts) override;

 private:
  struct Gathers;
  class GatherPending;

  std::shared_ptr<Exchange> inner_;
  std::shared_ptr<Exchange> outer_;
  std::unique_ptr<Gathers> gathers_;
};

}  // namespace zx
