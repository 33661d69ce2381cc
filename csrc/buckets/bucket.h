// A bucket and the parameters in it: what the bucket manager remembers between two gradients.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string>
#include <vector>

namespace zx {

using AccumulatorNode = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

// What was installed on a parameter's AccumulateGrad node.
struct Hooks {
  AccumulatorNode accumulator{};  // the parameter holds it weakly: without this the hooks would go
  torch::autograd::FunctionPreHook* before = nullptr;
  uintptr_t after = 0;
  int between = 0;  // threads that are between the two: each accumulates into p.grad
};

// Remembers which tensor p.grad was. Held weakly, which keeps its address from being another tensor's.
class SeenGrad {
 public:
  void note(const at::Tensor& grad) {
    tensor_ = grad.getIntrusivePtr();
    version_ = version_of(grad);
  }
  void forget() { tensor_.reset(); }
  bool is(const at::Tensor& grad) const {
    return grad.defined() && tensor_._unsafe_get_target() == grad.unsafeGetTensorImpl();
  }
  // And no operator has written it since.
  bool is_still(const at::Tensor& grad) const { return is(grad) && version_of(grad) == version_; }

 private:
  static int64_t version_of(const at::Tensor& grad) {
    return grad.defined() && !grad.is_inference() ? grad._version() : 0;  // those of inference mode have none
  }

  c10::weak_intrusive_ptr<c10::TensorImpl> tensor_{c10::intrusive_ptr<c10::TensorImpl>()};
  int64_t version_ = 0;
};
struct SeenGrads {
  SeenGrad local;   // autograd wrote it last: any other was put there by hand
  SeenGrad scaled;  // there when mark_scaled() was called, and what it stands for is not discarded
};

// Of a gradient that stays whole (ZeRO stage 1).
struct WholeGrad {
  bool unsent = false;   // autograd wrote p.grad inside no_sync(), and no flight took it yet
  bool reached = false;  // by a synchronising backward, on some rank, since the last step
  SeenGrad mean;         // as it was left in p.grad

  // Whether p.grad is this rank's own, over several ranks. What a synchronising backward has reached is used as it
  // stands, whatever was done to it since; else only the mean itself is the mean.
  bool is_local(const at::Tensor& grad) const {
    return grad.defined() && (unsent || (!reached && !mean.is_still(grad)));
  }
};

// A parameter's place in the bucket's buffer. The order of `view` is the state's. The rest is what `view` says: a look
// at it would miss the core's cache once more for each parameter of each step.
struct Home {
  explicit Home(at::Tensor place)
      : view(std::move(place)), address(view.const_data_ptr()), sizes(view.sizes()), strides(view.strides()) {}

  // By address: see Note [Every parameter has a storage of its own].
  bool has(const at::Tensor& param) const {
    return (param.numel() == 0 || param.const_data_ptr() == address) && param.sizes() == at::IntArrayRef(sizes) &&
           param.strides() == at::IntArrayRef(strides);
  }

  at::Tensor view;
  const void* address;
  at::DimVector sizes;
  at::DimVector strides;
};

// One parameter: its place in the bucket, and what this rank knows of its gradient.
//
// Note [Who holds a gradient]
// Once a gradient has left, the reduced one lives on its owner alone, and p.grad is a placeholder. `held` says that
// this rank still stands by what it contributed. Whoever finds the placeholder gone (p.grad = None, model.zero_grad())
// or replaced by another tensor has discarded the reduced gradient, and must tell its owner: `replace` is sent with
// the parameter's next flight, or exchanged by step() if there is none.
struct Slot {
  std::string name;
  at::Tensor param;
  at::Tensor placeholder;  // undefined where gradients stay whole (ZeRO stage 1)
  int64_t offset;          // of its first element in the bucket
  Home home;

  Hooks hooks;

  bool fired = false;    // in this backward
  bool held = false;     // see the note
  bool replace = false;  // see the note
  bool zeroed = false;   // held, and zero_() was called on the placeholder
  SeenGrads seen{};
  WholeGrad whole{};

  int64_t numel() const { return home.view.numel(); }
};

// This rank's share of a bucket's reduced gradient. Written where flights land, read after land().
struct Landed {
  at::Tensor shard;  // [shard_numel] of the wire's dtype; undefined while it holds nothing, unless it keeps its place
  std::vector<at::Tensor> pieces;  // or these, of the bucket's parts: see Note [Alone, gradients stay where they are]
  at::Tensor present;              // uint8 [n]: which segments have a gradient, on any rank
  at::Tensor replaced;             // uint8 [n]: scratch of the last landing
  at::Tensor words;                // exact sum of squares over the shard; undefined when unknown
  bool holds = false;              // some slot has a gradient
  bool keeps_shard = false;        // at one address from step to step, for CUDA graphs
};

// A part of this rank's shard that is reduced by a call of its own.
struct Part {
  size_t message;         // that it comes in from each rank: see Note [Straight from the gradient]
  int64_t message_start;  // of its first element there
  int64_t start;          // in the shard
  int64_t numel;
  int64_t first_row;    // of the bucket's segments
  at::Tensor segments;  // those inside, counted from `start`
};

struct Bucket {
  int64_t index;
  std::vector<Slot> slots;  // by offset
  at::Tensor flat;          // that the parameters lie in
  at::ScalarType wire_dtype;
  at::ScalarType grad_dtype;  // of whole gradients, and of local ones unless somebody put another there by hand
  int64_t shard_numel;        // of each rank, without flags
  int64_t trailer_numel;      // elements for flags behind each shard on the wire
  at::Tensor segments;        // int64 [n, 5]: the slots that overlap this rank's shard, see math/segment.h

  Landed landed;
  std::vector<c10::Stream> producers;  // on an accelerator: where gradients came since the last flight

  int64_t num_straight = 0;  // slots: see Notes [Straight from the gradient] and [Alone, gradients stay where they are]
  std::vector<Part> parts;   // in order: of each straight slot with elements here, then of what was packed

  // Whether some of the slot's elements lie in this rank's shard. An empty parameter lies where its offset does.
  bool owns_part_of(const Slot& slot, int64_t rank) const {
    const int64_t last = slot.numel() == 0 ? slot.offset : slot.offset + slot.numel() - 1;
    return slot.offset / shard_numel <= rank && rank <= last / shard_numel;
  }
  // Whether whole gradients have all that the shard, which is of the wire's dtype, has.
  bool whole_grads_hold_shard() const { return c10::promoteTypes(grad_dtype, wire_dtype) == grad_dtype; }
  int64_t slice_numel() const { return shard_numel + trailer_numel; }
  // Where straight slots end in the bucket.
  int64_t straight_end() const {
    return num_straight == 0 ? 0 : slots[num_straight - 1].offset + slots[num_straight - 1].numel();
  }
  // Elements of a rank's slice that straight slots take: what is packed lies behind them.
  int64_t straight_numel(int64_t rank) const {
    return std::clamp<int64_t>(straight_end() - rank * shard_numel, 0, shard_numel);
  }
  // In a flight's `flat`, where the packed part of a rank's slice starts; for rank = world, where all ends.
  int64_t packed_start(int64_t rank) const {
    return rank * slice_numel() - std::min(straight_end(), rank * shard_numel);
  }
  std::string describe() const;  // "bucket 3 (wte.weight, ...)"
};

inline std::string Bucket::describe() const {
  constexpr size_t kMostNames = 8;
  std::string text = "bucket " + std::to_string(index) + " (";
  for (size_t i = 0; i < slots.size() && i < kMostNames; ++i) text += (i == 0 ? "" : ", ") + slots[i].name;
  if (slots.size() > kMostNames) text += " and " + std::to_string(slots.size() - kMostNames) + " more";
  return text + ")";
}

}  // namespace zx
