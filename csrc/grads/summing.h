// The reduction of a flat group: every rank's contribution arrives here, and is added up in rank order.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "grads/reduction.h"

namespace zx {

class Summing : public Reduction {
 public:
  explicit Summing(std::shared_ptr<Exchange> exchange) : exchange_(std::move(exchange)) {}

  std::shared_ptr<Pending> send(Flight& flight) override;
  void reduce(Flight& flight) override;
  bool takes_zero_copy(const Bucket& /*bucket*/) const override { return exchange_->sends_messages(); }
  bool is_local(const Bucket& /*bucket*/) const override { return false; }
  int64_t most_in_a_part(const Bucket& bucket) const override;

 protected:
  using AllMessages = std::vector<Exchange::Messages>;  // from each rank

  AllMessages messages_of(Flight& flight) const;
  void read_flags(const Flight& flight, const AllMessages& messages);
  void sum(const Flight& flight, const AllMessages& messages, bool accumulate);

 private:
  std::vector<at::Tensor> slices(const Flight& flight, const AllMessages& messages, size_t message, int64_t start,
                                 int64_t numel);

  std::shared_ptr<Exchange> exchange_;
  std::vector<at::Tensor> scratch_;  // what was read from each neighbour
};

}  // namespace zx
