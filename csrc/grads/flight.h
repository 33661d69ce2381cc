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

struct Flight {
  std::shared_ptr<Bucket> bucket;
  // Until packed: what to copy where. See flatten_ in csrc/bindings/module.cpp.
  std::vector<at::Tensor> sources;
  at::Tensor pieces;
  at::Tensor flags;
  // Until landed: the gradients of straight slots in memory order, zeros where there is none.
  std::vector<at::Tensor> straight{};
  // Whether, as far as this rank knows, some gradient is added to one that landed before and was not discarded.
  bool adds = false;
  // On an accelerator: the streams that produced the gradients, and how far each had come. See Note [Streams].
  std::vector<c10::Stream> producers{};
  Events ready{};
  std::optional<c10::Event> packed{};
  // From packed to landed.
  at::Tensor flat{};      // [world * slice_numel], less what is straight
  at::Tensor received{};  // [num_received * slice_numel]
  at::Tensor partial{};   // [outer world * slice_numel], sums over the inner axis: see Note [Two levels]
  std::shared_ptr<Pending> pending{};

  std::string describe() const { return bucket->describe(); }
};

}  // namespace zx
