#include "grads/in_place.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/nan_to_num.h>

#include "check.h"
#include "grads/zero_copy.h"

namespace zx {
namespace {

std::optional<at::Scalar> scalar(std::optional<double> number) {
  return number ? std::optional<at::Scalar>(*number) : std::nullopt;
}

}  // namespace

void do_in_place(Bucket& bucket, const InPlace& call) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  put_together(bucket);  // see Note [Alone, gradients stay where they are]
  ReducedShard& reduced = bucket.reduced;
  if (!reduced.shard.defined() || call.start >= call.stop) return;
  at::Tensor values = reduced.shard.narrow(0, call.start, call.stop - call.start);
  const auto number = [&call](size_t i) { return i < call.numbers.size() ? call.numbers[i] : std::nullopt; };
  if (call.factor.defined()) {
    values.mul_(call.factor);
  } else if (call.name == "mul_") {
    values.mul_(number(0).value());
  } else if (call.name == "div_") {
    values.div_(number(0).value());
  } else if (call.name == "fill_") {
    values.fill_(number(0).value());
  } else if (call.name == "clamp_") {
    at::clamp_(values, scalar(number(0)), scalar(number(1)));
  } else if (call.name == "nan_to_num_") {
    at::nan_to_num_(values, number(0), number(1), number(2));
  } else {
    TORCH_CHECK(false, "zerox: no operator on a shard is named ", call.name);
  }
  reduced.limbs.reset();
  ++reduced.version;
}

}  // namespace zx
