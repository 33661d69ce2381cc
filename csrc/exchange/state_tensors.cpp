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

// The current stream comes after the last change then, and the next reader after both.
void StateTensors::note_change() {
  for (const at::Tensor& each : tensors_) {
    const c10::Device device = each.device();
    if (device.is_cpu()) continue;
    const c10::Stream here = internals::current_stream(device);
    if (const auto last = last_change(device)) last->block(here);
    auto event = std::make_shared<c10::Event>(device.type());
    event->record(here);
    const std::lock_guard lock(mutex_);
    changes_[device.index()] = std::move(event);
    return;  // they are all of one device
  }
}

std::shared_ptr<c10::Event> StateTensors::last_change(c10::Device device) const {
  const std::lock_guard lock(mutex_);
  const auto found = changes_.find(device.index());
  return found == changes_.end() ? nullptr : found->second;
}

void StateTensors::read(size_t place, size_t start, void* into, size_t bytes) const {
  const at::Tensor& values = tensors_.at(place);
  if (start + bytes > values.nbytes()) throw std::out_of_range("the state has no such bytes");
  if (!values.is_cpu()) return read_from_device(values, start, into, bytes);
  // As others read it, where the system lets processes do so: another thread may give the tensor other memory.
  const char* from = static_cast<const char*>(values.const_data_ptr()) + start;
  if (read_memory(getpid(), reinterpret_cast<uint64_t>(from), into, bytes)) return;
  if (errno == EFAULT || values.storage().nbytes() < values.storage_offset() * values.itemsize() + start + bytes) {
    throw std::runtime_error("its memory is gone");
  }
  std::memcpy(into, from, bytes);
}

void StateTensors::read_from_device(const at::Tensor& values, size_t start, void* into, size_t bytes) const {
  const c10::Device device = values.device();
  const c10::Stream stream = internals::stream_of_copies(device);
  const c10::StreamGuard on_stream(stream);
  if (const auto change = last_change(device)) change->block(stream);
  const auto size = static_cast<int64_t>(bytes);
  const at::Tensor from = values.view(at::kByte).narrow(0, static_cast<int64_t>(start), size);
  at::from_blob(into, {size}, at::kByte).copy_(from, /*non_blocking=*/true);
  check_may_wait("a device");
  stream.synchronize();
}

}  // namespace zx
