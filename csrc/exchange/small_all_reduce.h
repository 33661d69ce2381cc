// An all-reduce of a few numbers, for latency: recursive doubling over point-to-point messages.
//
// gloo's own takes three times as long between two ranks, and its ring takes 2 (W - 1) hops where this takes log2 W,
// or two more if W is no power of two. (Thakur, Rabenseifner, Gropp: "Optimization of Collective Communication
// Operations in MPICH", 2005, section 4.5.)
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "exchange/tags.h"
#include "exchange/whereabouts.h"

namespace zx {

enum class Combine { sum, max };

class SmallAllReduce {
 public:
  // The line's group must take CPU tensors.
  explicit SmallAllReduce(Line line) : line_(std::move(line)) {}

  // In place, for a contiguous CPU tensor of integers, of the same shape on all ranks. Collective; one thread only.
  // Throws std::runtime_error that names the rank that is gone.
  void run(at::Tensor& values, Combine combine);

  // The same with what `combine` makes of this rank's values and another's: in any order the same.
  using CombineInto = std::function<void(at::Tensor& values, const at::Tensor& theirs)>;
  void run(at::Tensor& values, const CombineInto& combine);

 private:
  Line line_;
  Tags tags_{TagKind::small};
};

}  // namespace zx
