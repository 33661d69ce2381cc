// Where tensors lie, asked without reading them.
#pragma once

#include <ATen/core/Tensor.h>

#include "torch_internals.h"

namespace zx {

using internals::data_ptr_of;

// As tensor.const_data_ptr().
inline const void* address_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return nullptr;
  const auto* start = static_cast<const char*>(data_ptr_of(tensor).get());
  return start + tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}

}  // namespace zx
