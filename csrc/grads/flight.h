// One bucket on its way: the gradients it was packed from, the buffers it travels in, the messages it waits for.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "buckets/bucket.h"
#include "exchange/exchange.h"
#include "workers/streams.h"

namespace zx {

// Tables of flatten_ in csrc/bindings/module.cpp: what to copy where.
struct Copies {
  at::Tensor pieces;
  at::Tensor flags;
};

// On an accelerator: the streams that produced the gradients, and how far each had come. See Note [Streams].
struct Produced {
  std::vector<c10::Stream> by;
  Events ready;
};

struct Flight {
  std::shared_ptr<Bucket> bucket;
  // Until packed.
  std::vector<at::Tensor> sources;
  Copies copies{};
  // Until reduced: the gradients of zero-copy slots in memory order, zeros where there is none.
  std::vector<at::Tensor> zero_copy{};
  // Whether, as far as this rank knows, some gradient is added to one that was reduced before and was not discarded.
  bool adds = false;
  // Whether its sums wait on the inner axis for the next flight: see Note [Sums that wait].
  bool stays_inner = false;
  Produced produced{};
  std::optional<c10::Event> packed{};
  // From packed to reduced.
  at::Tensor flat{};        // the slices of all ranks, less what is zero-copy
  at::Tensor received{};    // [num_received * own_slice_numel()], on a mesh of slices of a column of owners
  at::Tensor inner_sums{};  // the slices of that column, sums over the inner axis: see Note [Two levels]
  std::shared_ptr<Pending> pending{};

  std::string describe() const { return bucket->describe(); }
};

}  // namespace zx
