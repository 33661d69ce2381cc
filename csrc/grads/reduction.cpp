#include "grads/reduction.h"

#include <utility>

#include "grads/summing.h"
#include "grads/zero_copy.h"
#include "workers/ranges.h"

namespace zx {
namespace {

// One rank's gradients are the mean already. See Note [Alone, gradients stay where they are].
class Keeping final : public Summing {
 public:
  using Summing::Summing;

  std::shared_ptr<Pending> send(Flight& /*flight*/) override { return nullptr; }

  void reduce(Flight& flight) override {
    Bucket& bucket = *flight.bucket;
    const Range range("reduce", bucket.index);
    auto messages = messages_of(flight);
    read_flags(flight, messages);
    ReducedShard& reduced = bucket.reduced;
    if (!flight.adds && !reduced.keeps_shard) {  // model.zero_grad() leaves this to us
      reduced.by_part.clear();
      reduced.shard.reset();
    }
    if (reduced.has_gradient) put_together(bucket);
    const bool accumulate = std::exchange(reduced.has_gradient, true) && reduced.shard.defined();
    if (accumulate || reduced.keeps_shard || bucket.reduced.divisor != 1.0) {
      sum(flight, messages, accumulate);
    } else {
      keep(bucket, messages.front());
    }
  }

  bool takes_zero_copy(const Bucket& bucket) const override { return stay_in_place(bucket); }
  bool is_local(const Bucket& /*bucket*/) const override { return true; }

 private:
  // Leaves the norm to a later call that asks for it.
  static void keep(Bucket& bucket, Exchange::Messages& own) {
    ReducedShard& reduced = bucket.reduced;
    reduced.limbs.reset();
    own.back() = own.back().narrow(0, 0, bucket.own.parts.back().numel);  // without its flags
    if (bucket.num_zero_copy == 0) {
      reduced.shard = std::move(own.back());  // everything was packed
    } else {
      reduced.by_part = std::move(own);
    }
  }
};

}  // namespace

std::unique_ptr<Reduction> make_reduction(std::shared_ptr<Exchange> exchange) {
  if (!exchange->has_group()) return std::make_unique<Keeping>(std::move(exchange));
  return std::make_unique<Summing>(std::move(exchange));
}

}  // namespace zx
