// All that csrc uses of torch and that a later torch may change: what is no documented interface, and names that torch
// says by itself. zerox/_torch.py has the same for Python. What has another type or is gone shows when this is built;
// names would be missed in silence, so missing_operators() and check_regions() of zerox/_torch.py look for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/record_stream_ops.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "torch_names.h"

namespace zx::internals {

// Those of the names that no operator of torch has. Takes a millisecond.
inline std::vector<std::string> missing_operators(const std::vector<std::string>& names) {
  std::set<std::string> known;
  for (const c10::OperatorName& each : c10::Dispatcher::singleton().getAllOpNames()) known.insert(each.name);
  std::vector<std::string> missing;
  for (const std::string& name : names) {
    if (known.count(name) == 0) missing.push_back(name);
  }
  return missing;
}

// Raises if torch has no such operator, or one of another signature.
template <class Signature>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// ---- Autograd: hooks on the nodes that add to p.grad, and where a backward ends

using torch::autograd::variable_list;
using PreHook = torch::autograd::FunctionPreHook;
using AccumulatorNode = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

[[noreturn]] inline void refuse_compiled_autograd() {
  TORCH_CHECK(false,
              "zerox does not work under compiled autograd: run backward() outside torch._dynamo.compiled_autograd");
}

// A hook that compiled autograd may not take into what it compiles.
class EagerPreHook : public PreHook {
 public:
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const final { refuse_compiled_autograd(); }
};

template <class Body>
std::unique_ptr<torch::autograd::FunctionPostHook> eager_post_hook(Body body) {
  return std::make_unique<torch::autograd::utils::LambdaPostHook>(
      std::move(body), [](torch::dynamo::autograd::CompiledNodeArgs& /*args*/) { refuse_compiled_autograd(); });
}

// Whether it is such a hook, or DistributedDataParallel's, which is of the same class. Others are not taken for
// somebody who sends gradients.
inline bool may_send_gradients(torch::autograd::FunctionPostHook* hook) {
  return dynamic_cast<torch::autograd::utils::LambdaPostHook*>(hook) != nullptr;
}

inline AccumulatorNode accumulator_of(const at::Tensor& param) {
  return torch::autograd::impl::grad_accumulator(param);
}
inline AccumulatorNode known_accumulator_of(const at::Tensor& param) {
  return torch::autograd::impl::try_get_grad_accumulator(param);
}
inline auto& hooks_of(const at::Tensor& param) { return torch::autograd::impl::hooks(param); }

// As `param.data = values`, which torch refuses where one of them is on the meta device. The tensor stays the same one
// for modules, hooks and weak references.
inline void set_data_of_meta(const at::Tensor& param, const at::Tensor& values) {
  param.unsafeGetTensorImpl()->shallow_copy_from(values.getIntrusivePtr());
}

inline AccumulatorNode current_node() { return torch::autograd::get_current_node(); }
inline int64_t current_graph_task() { return torch::autograd::get_current_graph_task_id(); }
inline const auto* current_exec_info() { return torch::autograd::get_current_graph_task_exec_info(); }
inline void at_end_of_backward(std::function<void()> body) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(body));
}

// ---- Devices, storages, dispatch

using Guard = c10::impl::VirtualGuardImpl;  // of any type of device

inline c10::Stream current_stream(c10::Device device) { return Guard(device.type()).getStream(device); }
inline c10::Stream high_priority_stream(c10::Device device) {
  return Guard(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

// Of streams that hardly anything else takes: others come from torch's pools, in turn, and may be one on which a
// collective waits for another rank. NCCL, zerox and FSDP2 take the highest priority, the default one and the one above
// that. (GPUs with three priorities or fewer have no other.)
inline c10::Stream stream_of_copies(c10::Device device) {
  constexpr int kBetween = -2;
  return Guard(device.type()).getNewStream(device, kBetween);
}

// As tensor.storage().data_ptr(), which raises for a released parameter if ZEROX_FAULTS=0.
inline const c10::DataPtr& data_ptr_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
}

// What it is or was a reference to, without making sure that this is still there.
inline const c10::TensorImpl* target_of(
    const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>& weak) {
  return weak._unsafe_get_target();
}

// Asking for the address of such a storage raises `why`. Torch's function is called after what else it does; the data
// stays.
inline void forbid_reads(c10::StorageImpl& storage, const char* why) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(why);
}
// Whether this torch can take that back.
template <class Storage>
constexpr bool can_forbid_reads = requires(Storage& storage) { storage.clear_data_ptr_access_error_msg_(); };
template <class Storage>
void allow_reads(Storage& storage) {
  if constexpr (can_forbid_reads<Storage>) storage.clear_data_ptr_access_error_msg_();
}

// A tensor with `like`'s dtype that has a storage for itself.
inline at::Tensor tensor_in(const c10::Storage& storage, const at::Tensor& like) {
  return at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), like.key_set(), like.dtype());
}

// The rest of Tensor.record_stream(), for a kernel of it at ADInplaceOrView.
inline void record_stream_below(c10::DispatchKeySet keys, at::Tensor& tensor, c10::Stream stream) {
  at::_ops::record_stream::redispatch(keys & c10::after_ADInplaceOrView_keyset, tensor, stream);
}

// Gives a storage another address, and keeps its context. Also where views share it copy-on-write, or it is frozen.
inline void move_storage(c10::StorageImpl& storage, void* address, c10::DeleterFnPtr deleter, c10::Device device) {
  c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  storage.set_data_ptr_noswap(c10::DataPtr(address, data.release_context(), deleter, device));
}

// While it lives, this thread's operators run below autograd, modes and transforms.
struct BelowAll {
  c10::impl::ForceDispatchKeyGuard plain{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::default_excluded_set};
};

// ---- DistributedDataParallel's reducer, c10d::Reducer: whether it waits for gradients, which it keeps to itself

struct Expects : c10d::Reducer {
  static bool gradients(const Reducer& reducer) { return reducer.*(&Expects::expect_autograd_hooks_); }
};

}  // namespace zx::internals
