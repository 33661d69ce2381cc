// Helpers for packing lists.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "bucket_manager/bucket.h"

namespace zx {

// An int64 tensor [numbers / columns, columns], or [numbers] for one column.
at::Tensor to_table(const std::vector<int64_t>& numbers, int64_t columns);

// The gradient's elements in the order in which the parameter's lie in memory.
at::Tensor in_order_of(const at::Tensor& grad, const at::Tensor& param);

// What to say of a slot whose gradient is sparse.
std::string refusal_of_sparse(const Slot& slot);

}  // namespace zx
