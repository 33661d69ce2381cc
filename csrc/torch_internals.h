// All that csrc uses of torch and that a later torch may change: what is no documented interface, and names that torch
// says by itself. zerox/_torch.py has the same for Python. What has another type or is gone shows when this is built;
// names would be missed in silence, so missing_operators() and check_regions() of zerox/_torch.py look for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace zx::internals {

// ---- Names. Without these overlap_gather() and stage 3 don't see what compiled code reads.

constexpr char kRegion[] = "Torch-Compiled Region";  // begins what Dynamo announces
constexpr char kShowsInputs[] = "CompiledFunction";  // the function in it that autograd announces, with inputs
constexpr char kBackward[] = "Backward";             // behind the name of a function in Python, of its backward
constexpr char kOfDTensor[] = "_spec";               // how it lies
constexpr char kLocalTensor[] = "_local_tensor";     // without these two, gradients are found by slower calls of Python
constexpr char kOwn[] = "aten::";                    // without it, writes of parameters are noticed that were none
constexpr char kCollective[] = "c10d::";             // without it, a collective on sharded parameters is not refused
constexpr char kDetach[] = "detach";                 // no operator's name, but so it is announced
// All that `p.data = ...` announces. Without it, step() would fetch what it is about to move.
constexpr char kSetsData[] = "aten::_has_compatible_shallow_copy_type";
// What nn.Embedding(max_norm=) calls before it looks up. Without it, ranks would write rows of their own batches.
constexpr char kRenorm[] = "aten::embedding_renorm_";

// An operator that reads the rows that it is given indices of, and no others. Without it, a lookup fetches all rows.
struct Lookup {
  const char* name;
  size_t table;
  size_t indices;
};
constexpr Lookup kLookups[] = {
    {"aten::embedding", 0, 1},
    {"aten::embedding_bag", 0, 1},
    {"aten::_embedding_bag", 0, 1},
    {"aten::_embedding_bag_forward_only", 0, 1},
    {"aten::_embedding_bag_per_sample_weights_backward", 1, 2},
};

// They read what a tensor is like, and make others like it. Without one, it fetches a table.
constexpr const char* kReadNoValue[] = {"aten::empty_like",        "aten::zeros_like",   "aten::ones_like",
                                        "aten::full_like",         "aten::new_empty",    "aten::new_zeros",
                                        "aten::new_ones",          "aten::new_full",     "aten::randn_like",
                                        "aten::new_empty_strided", "aten::is_same_size", "aten::rand_like"};

// The dispatcher keeps its names while the C++ methods are being renamed (_reduce_scatter_base became
// reduce_scatter_single between torch 2.11 and 2.13), so these collectives are called by name.
constexpr char kAllGather[] = "c10d::_allgather_base_";
constexpr char kReduceScatter[] = "c10d::_reduce_scatter_base_";
constexpr char kAllToAll[] = "c10d::alltoall_base_";

template <size_t size>
bool begins_with(const char* name, const char (&prefix)[size]) {
  return std::strncmp(name, prefix, size - 1) == 0;
}

inline bool reads_no_value(const char* name) {
  const auto is_name = [name](const char* each) { return std::strcmp(name, each) == 0; };
  return is_name(kDetach) || std::any_of(std::begin(kReadNoValue), std::end(kReadNoValue), is_name);
}

// Whether the name is that of an autograd function's backward; without what is behind the function's own.
inline std::string function_of(const std::string& backward) {
  const size_t behind = sizeof(kBackward) - 1;
  const bool is_one = backward.size() > behind && backward.compare(backward.size() - behind, behind, kBackward) == 0;
  return is_one ? backward.substr(0, backward.size() - behind) : "";
}

// What stage 3 must meet by these names, or it would give wrong values or fetch what nobody reads.
inline std::vector<std::string> operator_names() {
  std::vector<std::string> names(std::begin(kReadNoValue), std::end(kReadNoValue));
  for (const Lookup& lookup : kLookups) names.emplace_back(lookup.name);
  for (const char* name : {kSetsData, kRenorm, kAllGather, kReduceScatter, kAllToAll}) names.emplace_back(name);
  return names;
}

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

template <class Reducer>
struct Expects : Reducer {
  static bool gradients(const Reducer& reducer) { return reducer.*(&Expects::expect_autograd_hooks_); }
};

}  // namespace zx::internals
