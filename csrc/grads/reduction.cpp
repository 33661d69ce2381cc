#include "grads/reduction.h"

#include <utility>

#include "grads/straight.h"
#include "grads/summing.h"
#include "workers/ranges.h"

namespace zx {
namespace {

// One rank's gradients are the mean already. See Note [Alone, gradients stay where they are].
class Keeping final : public Summing {
 public:
  using Summing::Summing;

  std::shared_ptr<Pending> send(Flight& /*flight*/) override { return nullptr; }

  void land(Flight& flight) override {
    Bucket& bucket = *flight.bucket;
    const Range range("reduce", bucket.index);
    auto messages = messages_of(flight);
    read_flags(flight, messages);
    Landed& landed = bucket.landed;
    if (!flight.adds && !landed.keeps_shard) {  // model.zero_grad() leaves this to us
      landed.by_part.clear();
      landed.shard.reset();
    }
    if (landed.has_gradient) put_together(bucket);
    const bool accumulate = std::exchange(landed.has_gradient, true) && landed.shard.defined();
    if (accumulate || landed.keeps_shard || bucket.landed.divisor != 1.0) {
      sum(flight, messages, accumulate);
    } else {
      keep(bucket, messages.front());
    }
  }

  bool takes_straight(const Bucket& bucket) const override { return stay_in_place(bucket); }
  bool is_local(const Bucket& /*bucket*/) const override { return true; }

 private:
  // Leaves the norm to a later call that asks for it.
  static void keep(Bucket& bucket, Exchange::Messages& own) {
    Landed& landed = bucket.landed;
    landed.words.reset();
    own.back() = own.back().narrow(0, 0, bucket.own.parts.back().numel);  // without its flags
    if (bucket.num_straight == 0) {
      landed.shard = std::move(own.back());  // everything was packed
    } else {
      landed.by_part = std::move(own);
    }
  }
};

}  // namespace

std::unique_ptr<Reduction> make_reduction(std::shared_ptr<Exchange> exchange) {
  if (!exchange->has_group()) return std::make_unique<Keeping>(std::move(exchange));
  return std::make_unique<Summing>(std::move(exchange));
}

}  // namespace zx
