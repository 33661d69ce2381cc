// A bucket and its parameters: what the bucket manager remembers from one gradient to the next.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "buckets/address.h"
#include "buckets/shards.h"
#include "torch_internals.h"

namespace zx {

class Decision;  // grads/decision.h

// Note [Hooks follow the parameter]
// The hooks that see a gradient hang on the parameter's AccumulateGrad node. torch drops that node where `.data` gets
// another dtype or device: after model.half().float() the parameter is as it was, but its next backward goes through a
// new node, without hooks. A hook of the parameter itself stays, and torch calls it before those of the node. So every
// parameter has one, the watch, which hangs the others on a new node when that is about to accumulate. Other ranks wait
// for this gradient: it is too late to look for new nodes at a sync point.
//
// A user's first register_hook() makes the parameter's list of hooks anew, and the watch is gone. It is put back at
// zero_grad() and at a sync point (GradHooks::restore_watches). Only if the node is dropped between those two, too, can
// gradients arrive unseen; in ZeRO stage 1 they are refused then, since p.grad may be this rank's own or the mean.
struct Watch {
  std::atomic<const void*> node{nullptr};  // the one that has the other hooks
  std::atomic<bool> is_gone{false};
  internals::PreHook* hook = nullptr;  // while it is not gone
};

// The hooks on a parameter, and on its AccumulateGrad node.
struct Hooks {
  internals::AccumulatorNode
      accumulator{};  // the parameter holds it only weakly: without this reference the hooks would vanish
  internals::PreHook* before = nullptr;
  uintptr_t after = 0;
  std::shared_ptr<Watch> watch{};
  std::shared_ptr<Decision> decision{};  // of the wrapper around its module; null without one
};

// Remembers which tensor p.grad was. It holds the tensor weakly, so that no other tensor can get the same address.
class SeenGrad {
 public:
  void note(const at::Tensor& grad) {
    tensor_ = grad.getIntrusivePtr();
    version_ = version_of(grad);
  }
  void forget() { tensor_.reset(); }
  bool is(const at::Tensor& grad) const {
    return grad.defined() && internals::target_of(tensor_) == grad.unsafeGetTensorImpl();
  }
  // Whether it is the same tensor, and no operator has written it since.
  bool is_still(const at::Tensor& grad) const { return is_after(0, grad); }
  // Whether it is the same tensor, and was written so often since.
  bool is_after(int64_t writes, const at::Tensor& grad) const {
    return is(grad) && version_of(grad) == version_ + writes;
  }
  // Whether there was one that is not forgotten.
  bool is_any() const { return internals::target_of(tensor_) != nullptr; }

 private:
  static int64_t version_of(const at::Tensor& grad) {
    return grad.defined() && !grad.is_inference() ? grad._version() : 0;  // an inference tensor has no version
  }

  c10::weak_intrusive_ptr<c10::TensorImpl> tensor_{c10::intrusive_ptr<c10::TensorImpl>()};
  int64_t version_ = 0;
};

// How gradients of a DTensor came: a bit for each dimension of its mesh. See Note [Local tensors].
struct SeenPlacements {
  static constexpr int kMostDims = 4;
  uint8_t partial = 0;     // as this rank's part of a sum over that dimension, where the parameter is the same on it
  uint8_t replicated = 0;  // as the same on all of it, as the parameter is
  bool is_alike = false;   // once, exactly as the parameter lies
};

struct SeenGrads {
  SeenGrad local;               // the one that autograd wrote last: any other was put there by hand
  SeenGrad scaled;              // the one at mark_scaled(), until the gradient that it stands for is discarded
  int writers = 0;              // threads that are between the two hooks: each accumulates into p.grad
  SeenPlacements placements{};  // on any rank
};

// The facts about a gradient that stays whole (ZeRO stage 1).
struct WholeGrad {
  bool unsent = false;     // p.grad was written inside no_sync(), or before the bucket was added; no flight took it yet
  bool reached = false;    // by a synchronising backward, on some rank, since the last step
  SeenGrad mean;           // the mean as it was left in p.grad
  int64_t num_added = 0;   // how often autograd has written p.grad since
  bool is_undone = false;  // p.grad was the mean: see Note [A mean that is sent again]

  // Whether the user wrote to the mean.
  bool is_touched(const at::Tensor& grad) const { return reached && !unsent && mean.is(grad) && !mean.is_still(grad); }
  // With several ranks: whether p.grad is this rank's own, and not the mean. If a synchronising backward has reached
  // it, it is used as it stands, whatever was done to it since. If not, it is the mean only while it still is the
  // `mean` left here.
  bool is_local(const at::Tensor& grad) const {
    return grad.defined() && (unsent || (!reached && !mean.is_still(grad)));
  }
};

// See Note [Several gradients in one backward].
struct Fired {
  int32_t count = 0;    // gradients in this backward
  int32_t awaited = 0;  // that it had in a backward before; 0 if none is known
};

// Note [Local tensors]
// A parameter may be a DTensor: a tensor that several ranks of a model axis (tensor parallel, say) have together, each
// a local tensor, which is a plain one. What lies in the bucket, travels and is updated is the local tensor. The
// parameter itself is what autograd knows: it has the hooks, and p.grad, which is a DTensor too. Of a plain parameter
// the local tensor is the parameter.

// A parameter's place in the bucket's buffer. States have the order of `view`. The other fields repeat what `view`
// says: reading them there would cost one more cache miss for each parameter in each step.
struct Home {
  // `moves`: its storage may be relocated (stage 3 on accelerators).
  Home(at::Tensor place, at::Tensor there, bool of_dtensor, bool moves)
      : view(std::move(place)),
        local(std::move(there)),
        is_of_dtensor(of_dtensor),
        address(moves ? nullptr : address_of(view)),
        numel(view.numel()),
        device(view.device()),
        is_contiguous(view.is_contiguous()),
        sizes(view.sizes()),
        strides(view.strides()) {}

  // Compares addresses: see Note [Every parameter has a storage of its own].
  bool has_param() const {
    const void* here = address != nullptr ? address : address_of(view);
    return (local.numel() == 0 || address_of(local) == here) && local.sizes() == at::IntArrayRef(sizes) &&
           local.strides() == at::IntArrayRef(strides);
  }
  // Whether the elements of a tensor of these sizes lie in the same order.
  bool has_order_of(const at::Tensor& tensor) const {
    return tensor.strides() == at::IntArrayRef(strides) || (is_contiguous && tensor.is_contiguous());
  }

  at::Tensor view;
  at::Tensor local;     // see Note [Local tensors]
  bool is_of_dtensor;   // the parameter is one
  const void* address;  // null if it moves
  int64_t numel;
  c10::Device device;
  bool is_contiguous;
  at::DimVector sizes;
  at::DimVector strides;
};

// One parameter: its position in the bucket, and what this rank knows of its gradient.
//
// Note [Who holds a gradient]
// Once a gradient has left, the reduced one lives on its owner alone, and p.grad is a placeholder. `held` says that
// this rank still stands by its contribution. If the placeholder is gone (p.grad = None, model.zero_grad()) or replaced
// by another tensor, the reduced gradient was discarded, and this rank must tell the owner: `replace` is sent with the
// parameter's next flight, or exchanged by step() if there is none.
//
// Every step walks all slots several times, and takes about as long as the cache lines that it misses. So what such a
// walk reads comes first, and the rest after it.
struct Slot {
  at::Tensor param;
  at::Tensor placeholder;  // undefined where gradients stay whole (ZeRO stage 1)
  int64_t offset;          // of its first element in the bucket

  Fired fired{};
  bool held = false;     // see the note
  bool replace = false;  // see the note
  bool zeroed = false;   // held, and zero_() was called on the placeholder
  SeenGrads seen{};
  WholeGrad whole{};

  Home home;
  Hooks hooks{};
  std::string name;

  int64_t numel() const { return home.numel; }
};

// This rank's shard of a bucket's reduced gradient, which is the ranks' sum by `divisor`. It is written where flights
// are reduced, and read after Flights::await_all().
struct ReducedShard {
  at::Tensor shard;  // [own_numel()] of the wire's dtype; undefined while it holds nothing, unless keeps_shard
  std::vector<at::Tensor> by_part;  // or these, one per part: see Note [Alone, gradients stay where they are]
  at::Tensor present;               // uint8 [n]: which segments have a gradient, on any rank
  at::Tensor replaced;              // uint8 [n]: scratch of the last reduction
  at::Tensor limbs;                 // exact sum of squares over the shard; undefined when unknown
  at::Tensor left;            // sums that wait, with flags: see Note [Sums that wait]; undefined if there are none
  double divisor = 1.0;       // the number of ranks, for their mean
  bool has_gradient = false;  // some slot has a gradient
  bool keeps_shard = false;   // the shard stays at one address from step to step, for CUDA graphs
  int64_t version = 0;        // rises with each change
};

// A part of this rank's shard that is reduced by a call of its own.
struct Part {
  size_t message;         // index of the message from each rank that has it: see Note [Zero-copy from the gradient]
  int64_t message_start;  // of its first element in that message
  int64_t start;          // in the shard
  int64_t numel;
  int64_t first_row;    // of the bucket's segments
  at::Tensor segments;  // the rows inside the part, counted from `start`
};

// What lies in this rank's shard.
struct OwnShard {
  at::Tensor segments;      // int64 [n, 5]: the slots that overlap it, see math/segment.h
  std::vector<Part> parts;  // in order: of each zero-copy slot with elements here, then of the packed elements
};

// Note [Subgroups]
// A subgroup is the ranks that have one bucket's parameters and add up their gradients. Subgroup 0 is all ranks of the
// optimizer. A param group may have smaller ones: experts, of which rank 0 has others than rank 1. Then the ranks are
// cut into several subgroups of the same size, one of them this rank's, and the bucket stands for other parameters in
// each. What is agreed over all ranks (the order of launches, the rounds) holds for the buckets of all subgroups
// together, so that no two ranks wait for each other in different subgroups. What is told of one parameter must not be
// mixed up over subgroups: see told_in_subgroups().
struct Subgroup {
  int64_t exchange = 0;  // its place among the Exchanges
  int64_t rank = 0;      // this rank's number in it
  int64_t world = 1;     // how many ranks it has
  int64_t number = 0;    // which of the subgroups that the ranks were cut into
  int64_t count = 1;     // how many those are
};

struct Bucket {
  int64_t index;
  std::vector<Slot> slots;  // in each shard by offset
  at::Tensor flat;          // the buffer that the parameters lie in
  Subgroup subgroup{};
  at::ScalarType wire_dtype;
  at::ScalarType grad_dtype;  // of whole gradients, and of local ones unless another dtype was put there by hand
  Shards shards{};
  OwnShard own{};

  ReducedShard reduced;
  std::vector<c10::Stream> producers;  // on an accelerator: the streams that gradients came from since the last flight

  // Slots: see Notes [Zero-copy from the gradient] and [Alone, gradients stay where they are].
  int64_t num_zero_copy = 0;

  // Whether some of the slot's elements lie in `rank`'s shard. An empty parameter lies where its offset does.
  bool owns_part_of(const Slot& slot, int64_t rank) const {
    const int64_t last = slot.numel() == 0 ? slot.offset : slot.offset + slot.numel() - 1;
    return slot.offset < shards.stop(rank) && shards.start(rank) <= last;
  }
  // Whether whole gradients can hold every value of the shard, which has the wire's dtype.
  bool whole_grads_hold_shard() const { return c10::promoteTypes(grad_dtype, wire_dtype) == grad_dtype; }
  // Elements of this rank's shard, and with flags of each slice that comes here.
  int64_t own_numel() const { return shards.numel(subgroup.rank); }
  int64_t own_slice_numel() const { return shards.slice_numel(subgroup.rank); }
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
