#include "workers/streams.h"

#include "torch_internals.h"

namespace zx {
namespace {

internals::Guard guard(c10::Device device) { return internals::Guard(device.type()); }

}  // namespace

Streams::Streams(c10::Device device)
    : device_(device),
      pack_(internals::high_priority_stream(device)),
      reduce_(internals::high_priority_stream(device)) {}

Streams::~Streams() {
  try {
    await_all();
    const c10::Event here = record(current());
    here.block(pack_);
    here.block(reduce_);
  } catch (const c10::Error&) {  // the device's runtime may be gone when the process exits
  }
}

c10::Stream Streams::current() const { return guard(device_).getStream(device_); }

void Streams::synchronize_pack() const {
  check_may_wait("a device");
  guard(device_).synchronizeStream(pack_);
}

c10::Event Streams::record(c10::Stream stream) const {
  c10::Event event(device_.type());
  event.record(stream);
  return event;
}

Events Streams::record(const std::vector<c10::Stream>& streams) const {
  Events events;
  for (const c10::Stream& stream : streams) events.push_back(record(stream));
  return events;
}

void Streams::retain_gradients(std::vector<at::Tensor> gradients, std::vector<c10::Stream> producers,
                               c10::Event packed) {
  const std::lock_guard lock(mutex_);
  gradients_.push_back({std::move(gradients), std::move(producers), std::move(packed)});
}

void Streams::retain_buffers(std::vector<at::Tensor> buffers, c10::Event reduced) {
  const std::lock_guard lock(mutex_);
  buffers_.push_back({std::move(buffers), {pack_}, std::move(reduced)});
}

// Tensors are freed outside the lock: freeing one that Python has seen needs the GIL.
void Streams::free(std::unique_lock<Mutex<LockRank::streams>> lock, std::deque<Retained>& retained, size_t keep) {
  std::vector<Retained> freed;
  while (retained.size() > keep) {
    freed.push_back(std::move(retained.front()));
    retained.pop_front();
  }
  for (const Retained& each : freed) {
    for (const c10::Stream& owner : each.owners) each.passed.block(owner);
  }
  lock.unlock();
}

void Streams::free_gradients(size_t keep) { free(std::unique_lock(mutex_), gradients_, keep); }
void Streams::free_buffers(size_t keep) { free(std::unique_lock(mutex_), buffers_, keep); }

void Streams::await_all() {
  const c10::Stream here = current();
  record(pack_).block(here);
  record(reduce_).block(here);
  free_gradients(0);
  free_buffers(0);
}

}  // namespace zx
