// Where tensors lie, asked without reading them.
#pragma once

#include <ATen/core/Tensor.h>

namespace zx {

// As tensor.storage().data_ptr(), which raises for a released parameter if ZEROX_FAULTS=0.
inline const c10::DataPtr& data_ptr_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
}

// As tensor.const_data_ptr().
inline const void* address_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return nullptr;
  const auto* start = static_cast<const char*>(data_ptr_of(tensor).get());
  return start + tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}

}  // namespace zx
