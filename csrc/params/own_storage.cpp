#include "params/own_storage.h"

#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include "buckets/address.h"
#include "torch_internals.h"

namespace zx {
namespace {

FindMemory find_unknown_memory = [](const at::Tensor&) { return std::shared_ptr<UnknownMemory>(); };

void let_go(void* buffer) { delete static_cast<c10::Storage*>(buffer); }

// The buffer's storage, if with_own_storage() made the tensor's; null for all other tensors.
const c10::Storage* buffer_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = data_ptr_of(tensor);
  return data.get_deleter() == &let_go ? static_cast<const c10::Storage*>(data.get_context()) : nullptr;
}

// Does what torch's record_stream() does, on memory that the device's allocator knows.
void record_stream(c10::DispatchKeySet keys, at::Tensor& self, c10::Stream stream) {
  const auto memory = self.has_storage() ? find_unknown_memory(self) : nullptr;
  if (memory != nullptr) {
    memory->record_stream(stream);
    return;
  }
  at::Tensor known = self;
  if (const c10::Storage* buffer = buffer_of(self)) known = internals::tensor_in(*buffer, self);
  internals::record_stream_below(keys, known, stream);
}

TORCH_LIBRARY_IMPL(aten, ADInplaceOrView, m) { m.impl("record_stream", &record_stream); }

}  // namespace

at::Tensor with_own_storage(const at::Tensor& view) {
  TORCH_INTERNAL_ASSERT(view.is_non_overlapping_and_dense());
  return at::for_blob(view.mutable_data_ptr(), view.sizes())
      .strides(view.strides())
      .context(new c10::Storage(view.storage()), &let_go)
      .target_device(view.device())
      .options(view.options().requires_grad(false))
      .make_tensor();
}

bool has_own_storage(const at::Tensor& tensor) {
  return tensor.has_storage() && (buffer_of(tensor) != nullptr || find_unknown_memory(tensor) != nullptr);
}

void set_data(const at::Tensor& param, const at::Tensor& values) {
  TORCH_INTERNAL_ASSERT(param.sizes() == values.sizes() && param.scalar_type() == values.scalar_type());
  TORCH_INTERNAL_ASSERT(internals::known_accumulator_of(param) == nullptr);
  internals::set_data_of_meta(param, values);
}

void find_unknown_memory_by(FindMemory find) { find_unknown_memory = find; }

bool can_forbid_reads() { return internals::can_forbid_reads<c10::StorageImpl>; }

void forbid_reads(c10::StorageImpl& storage, const char* why) { internals::forbid_reads(storage, why); }

void allow_reads(c10::StorageImpl& storage) { internals::allow_reads(storage); }

}  // namespace zx
