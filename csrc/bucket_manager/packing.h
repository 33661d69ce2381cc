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

// Why a slot's gradient can't be packed; empty if it can.
std::string refusal_of(const Slot& slot, c10::Device device);

}  // namespace zx
