// An all-reduce of a few numbers, for latency: recursive doubling over point-to-point messages.
//
// gloo's own takes three times as long between two ranks, and its ring takes 2 (W - 1) hops where this takes log2 W,
// or two more if W is no power of two. (Thakur, Rabenseifner, Gropp: "Optimization of Collective Communication
// Operations in MPICH", 2005, section 4.5.)
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bucket_manager/tags.h"

namespace zx {

enum class Combine { sum, max };

class SmallAllReduce {
 public:
  // `group` may be null: one rank alone. It must take CPU tensors.
  explicit SmallAllReduce(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}

  // In place, for a contiguous CPU tensor of integers, of the same shape on all ranks. Collective; one thread only.
  void run(at::Tensor& values, Combine combine);

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  Tags tags_{TagKind::small};
};

}  // namespace zx
