// Helpers for packing lists.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zx {

// An int64 tensor [numbers / columns, columns], or [numbers] for one column.
at::Tensor to_table(const std::vector<int64_t>& numbers, int64_t columns);

// The gradient's elements in the order in which the parameter's lie in memory.
at::Tensor in_order_of(const at::Tensor& grad, const at::Tensor& param);

}  // namespace zx
