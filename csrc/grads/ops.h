// The kernels as the bucket manager calls them: through the dispatcher, so that one source serves every device.
#pragma once

#include <ATen/core/Tensor.h>

#include "torch_internals.h"

namespace zx::ops {

using internals::find_operator;

// The schemas in csrc/bindings/module.cpp say what the arguments are.
inline void flatten_(at::Tensor& flat, at::TensorList sources, const at::Tensor& pieces, const at::Tensor& flags) {
  static const auto op =
      find_operator<void(at::Tensor&, at::TensorList, const at::Tensor&, const at::Tensor&)>("zerox::flatten_");
  op.call(flat, sources, pieces, flags);
}

inline void read_flags_(at::Tensor& present, at::Tensor& replaced, at::TensorList slices, int64_t shard_numel) {
  static const auto op = find_operator<void(at::Tensor&, at::Tensor&, at::TensorList, int64_t)>("zerox::read_flags_");
  op.call(present, replaced, slices, shard_numel);
}

inline void reduce_(at::Tensor& shard, at::Tensor& limbs, at::TensorList slices, const at::Tensor& segments,
                    const at::Tensor& replaced, double divisor, bool accumulate) {
  static const auto op =
      find_operator<void(at::Tensor&, at::Tensor&, at::TensorList, const at::Tensor&, const at::Tensor&, double, bool)>(
          "zerox::reduce_");
  op.call(shard, limbs, slices, segments, replaced, divisor, accumulate);
}

}  // namespace zx::ops
