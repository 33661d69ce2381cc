// Parameters lie side by side in a bucket's buffer, and each has a storage of its own there.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>

namespace zx {

// Note [Every parameter has a storage of its own]
// Views of one buffer would share its storage. Libraries that recognise tied weights by their storage (safetensors,
// Accelerate, huggingface_hub) would take all parameters of a bucket for one tensor and keep only the first;
// torch.save() of one bias would write the whole bucket. So a parameter's storage begins and ends with its own
// elements, and keeps the buffer's storage alive. Three things follow:
// - A parameter is found by its address, never by its storage: two storages lie in one buffer, and share_memory_()
//   gives a storage other memory.
// - An allocator knows the buffer only. It ignores record_stream() of such a storage, and could give the memory to
//   other work while a stream still reads it. So we pass the call on to the buffer.
// - For the same reason torch can't share such a storage of a CUDA device with another process.

// The elements of `view`, which lie densely, in a storage of their own that keeps the view's storage alive.
at::Tensor with_own_storage(const at::Tensor& view);

// Whether the tensor's storage was made by with_own_storage() or by such memory as below, and has not been given other
// memory since.
bool has_own_storage(const at::Tensor& tensor);

// As `param.data = values`, of its shape and dtype, where one of them is on the meta device. Nothing has its gradient's
// node yet.
void set_data(const at::Tensor& param, const at::Tensor& values);

// Memory that makes storages of its own, which no allocator knows.
class UnknownMemory {
 public:
  virtual ~UnknownMemory() = default;
  // As Tensor.record_stream(): the stream may read it until it is released.
  virtual void record_stream(c10::Stream stream) = 0;
};

// `find` returns the memory of its kind that a tensor lies in, null for all other tensors.
using FindMemory = std::shared_ptr<UnknownMemory> (*)(const at::Tensor&);
// To be called once, before there is any such memory.
void find_unknown_memory_by(FindMemory find);

// Whether this torch can be told that nobody may ask for a storage's address; then data_ptr() of its tensors raises
// RuntimeError. Only address_of() (buckets/address.h) tells.
bool can_forbid_reads();
void forbid_reads(c10::StorageImpl& storage, const char* why);
void allow_reads(c10::StorageImpl& storage);

}  // namespace zx
