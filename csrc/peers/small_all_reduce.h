// An all-reduce of a few numbers, for latency. Ranks of one machine read each other's: see Note [Ranks of one machine
// synchronize in memory]. Others: recursive doubling over point-to-point messages.
//
// gloo's own all-reduce takes three times as long between two ranks. Its ring takes 2 (W - 1) hops where this takes
// log2 W, or two more if W is not a power of two. (Thakur, Rabenseifner, Gropp: "Optimization of Collective
// Communication Operations in MPICH", 2005, section 4.5.)
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "peers/failure_detector.h"
#include "peers/memory_messages.h"
#include "peers/tags.h"

namespace zx {

enum class Combine { sum, max };

class SmallAllReduce {
 public:
  // The communicator's group must take CPU tensors.
  explicit SmallAllReduce(Communicator comm) : comm_(std::move(comm)) {}

  // Reduces in place a contiguous CPU tensor of integers, which has the same shape on all ranks. Collective; to be
  // called by one thread only. Throws std::runtime_error that names the rank that is gone.
  void run(at::Tensor& values, Combine combine);

  // The same with `combine`, which merges another rank's values into this rank's. The result must not depend on the
  // order.
  using CombineInto = std::function<void(at::Tensor& values, const at::Tensor& theirs)>;
  void run(at::Tensor& values, const CombineInto& combine);

 private:
  void run_in_memory(at::Tensor& values, const CombineInto& combine);

  Communicator comm_;
  Tags tags_{TagKind::small};
  MemoryMessages memory_{comm_, tags_.next()};
};

}  // namespace zx
