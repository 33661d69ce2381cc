#include "grads/local_grad.h"

#include <c10/util/StringUtil.h>

#include <utility>

namespace zx {
namespace {

DTensorFunctions& functions() {
  static auto* found = new DTensorFunctions();  // leaked: threads may ask until the process is gone
  return *found;
}

std::function<bool(const at::Tensor&)>& placeholder_test() {
  static auto* found = new std::function<bool(const at::Tensor&)>();  // leaked, as above
  return *found;
}

// Why a gradient can't be packed; empty if it can.
std::string refusal_of(const Slot& slot, const at::Tensor& grad) {
  const Home& home = slot.home;
  if (grad.key_set().has(c10::DispatchKey::Python) && placeholder_test() && placeholder_test()(grad)) {
    return "parameter '" + slot.name +
           "' has a placeholder in p.grad that is not its own (copy.deepcopy() and .to() make copies), which stands "
           "for no gradient of this optimizer's; set p.grad = None";
  }
  const at::IntArrayRef sizes = home.sizes;
  if (grad.layout() == at::kStrided && grad.sizes() == sizes && grad.device() == home.device) return "";
  const std::string who = "parameter '" + slot.name + "' got a ";
  if (grad.layout() != at::kStrided) {
    return who +
           "sparse gradient; only dense ones can be sharded (nn.Embedding: use sparse=False, or a param group with "
           "sparse=True)";
  }
  return c10::str(who, "gradient of ", grad.sizes(), " on ", grad.device(), ", but was ", sizes, " on ", home.device,
                  " when the optimizer was built; build the optimizer after such a change");
}

bool is_placeholder(const Slot& slot, const at::Tensor& grad) {
  return slot.placeholder.defined() && grad.is_same(slot.placeholder);
}

}  // namespace

void set_placeholder_test(std::function<bool(const at::Tensor&)> is_placeholder) {
  placeholder_test() = std::move(is_placeholder);
}

void set_dtensor_functions(DTensorFunctions found) { functions() = std::move(found); }

LocalGrad local_grad(Slot& slot) {
  const at::Tensor& grad = slot.param.grad();
  if (!grad.defined() || is_placeholder(slot, grad)) return {.tensor = grad};
  if (!slot.home.is_of_dtensor) return {.tensor = grad, .refusal = refusal_of(slot, grad)};
  SeenPlacements& seen = slot.seen.placements;
  if (seen.is_alike && seen.partial == 0) {  // by far the most: so nothing but its local tensor is asked for
    at::Tensor local = functions().alike(slot.param, grad);
    if (local.defined()) {
      std::string refusal = refusal_of(slot, local);
      return {.tensor = std::move(local), .refusal = std::move(refusal)};
    }
  }
  DTensorGrad found = functions().find(slot.param, grad);
  if (!found.refusal.empty()) return {.refusal = "parameter '" + slot.name + "' " + found.refusal};
  std::string refusal = refusal_of(slot, found.local);
  seen.partial |= found.placements.partial;
  seen.replicated |= found.placements.replicated;
  seen.is_alike |= found.placements.partial == 0;
  return {.tensor = std::move(found.local), .refusal = std::move(refusal)};
}

at::Tensor values_of_grad(const Slot& slot) {
  const at::Tensor& grad = slot.param.grad();
  return slot.home.is_of_dtensor ? functions().values_of(grad) : grad;
}

void zero_grad_of(const Slot& slot) {
  at::Tensor& grad = slot.param.mutable_grad();
  if (!slot.home.is_of_dtensor) {
    grad.detach_().zero_();
    return;
  }
  functions().values_of(grad).zero_();
  grad.unsafeGetTensorImpl()->bump_version();
}

void set_local_grad(Slot& slot, at::Tensor local) {
  at::Tensor& grad = slot.param.mutable_grad();
  grad = slot.home.is_of_dtensor ? functions().wrap(slot.param, grad, local, slot.seen.placements.partial)
                                 : std::move(local);
}

}  // namespace zx
