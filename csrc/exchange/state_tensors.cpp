#include "exchange/state_tensors.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "peers/neighbours.h"
#include "torch_internals.h"

namespace zx {

std::vector<int64_t> StateTensors::addresses() const {
  std::vector<int64_t> found;
  found.reserve(tensors_.size());
  for (const at::Tensor& each : tensors_) found.push_back(reinterpret_cast<int64_t>(each.const_data_ptr()));
  return found;
}

// One of them, if they are a device's: they are all of one.
const at::Tensor* StateTensors::on_device() const {
  for (const at::Tensor& each : tensors_) {
    if (!each.is_cpu()) return &each;
  }
  return nullptr;
}

// What another stream has changed before comes before this change, too.
void StateTensors::note_change() {
  const at::Tensor* const one = on_device();
  if (one == nullptr) return;
  follow_change();
  auto event = std::make_shared<c10::Event>(one->device().type());
  event->record(internals::current_stream(one->device()));
  const std::lock_guard lock(mutex_);
  changes_[one->device().index()] = std::move(event);
}

void StateTensors::follow_change() const {
  const at::Tensor* const one = on_device();
  const auto last = one == nullptr ? nullptr : last_change(one->device());
  if (last) last->block(internals::current_stream(one->device()));
}

std::shared_ptr<c10::Event> StateTensors::last_change(c10::Device device) const {
  const std::lock_guard lock(mutex_);
  const auto found = changes_.find(device.index());
  return found == changes_.end() ? nullptr : found->second;
}

void StateTensors::read(size_t place, size_t start, void* into, size_t bytes, bool follows_caller) const {
  const at::Tensor& values = tensors_.at(place);
  if (start + bytes > values.nbytes()) throw std::out_of_range("the state has no such bytes");
  if (!values.is_cpu()) return read_from_device(values, start, into, bytes, follows_caller);
  // As others read it, where the system lets processes do so: another thread may give the tensor other memory.
  const char* from = static_cast<const char*>(values.const_data_ptr()) + start;
  if (read_memory(getpid(), reinterpret_cast<uint64_t>(from), into, bytes)) return;
  if (errno == EFAULT || values.storage().nbytes() < values.storage_offset() * values.itemsize() + start + bytes) {
    throw std::runtime_error("its memory is gone");
  }
  std::memcpy(into, from, bytes);  // nobody should move it meanwhile
}

void StateTensors::read_from_device(const at::Tensor& values, size_t start, void* into, size_t bytes,
                                    bool follows_caller) const {
  const c10::Device device = values.device();
  c10::Event of_caller(device.type());
  if (follows_caller) of_caller.record(internals::current_stream(device));
  const c10::Stream stream = internals::stream_of_copies(device);
  const c10::StreamGuard on_stream(stream);
  if (const auto change = last_change(device)) change->block(stream);
  if (follows_caller) of_caller.block(stream);
  const auto size = static_cast<int64_t>(bytes);
  const at::Tensor from = values.view(at::kByte).narrow(0, static_cast<int64_t>(start), size);
  at::from_blob(into, {size}, at::kByte).copy_(from, /*non_blocking=*/true);
  check_may_wait("a device");
  stream.synchronize();
}

}  // namespace zx
