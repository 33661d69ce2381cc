// torch's CPU allocator with a counter in front: what every thread of a process allocates and frees, workers included.
// Loaded with ctypes by bench/allocator.py.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace {

struct CountingAllocator final : c10::Allocator {
  explicit CountingAllocator(c10::Allocator* counted) : inner(counted) {}

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr made = inner->allocate(bytes);
    void* data = made.release_context();
    if (data == nullptr) return {nullptr, nullptr, &free_counted, made.device()};
    const std::lock_guard lock(mutex);
    bytes_of[data] = static_cast<int64_t>(bytes);
    now += static_cast<int64_t>(bytes);
    peak = std::max(peak, now);
    return {data, data, &free_counted, made.device()};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  static void free_counted(void* data);

  c10::Allocator* inner;
  std::mutex mutex;  // of what follows
  std::unordered_map<void*, int64_t> bytes_of;
  int64_t now = 0;
  int64_t peak = 0;
};

CountingAllocator* counting = nullptr;  // never deleted: tensors may be freed after static objects are

void CountingAllocator::free_counted(void* data) {
  if (data == nullptr) return;
  {
    const std::lock_guard lock(counting->mutex);
    const auto found = counting->bytes_of.find(data);
    counting->now -= found->second;
    counting->bytes_of.erase(found);
  }
  counting->inner->raw_deleter()(data);
}

}  // namespace

extern "C" {

// Comes before the others. Stays for the life of the process: tensors allocated from now on are freed through it.
void start_counting() {
  if (counting != nullptr) return;
  counting = new CountingAllocator(c10::GetCPUAllocator());
  c10::SetCPUAllocator(counting, /*priority=*/1);
}

int64_t bytes_now() {
  const std::lock_guard lock(counting->mutex);
  return counting->now;
}

int64_t bytes_peak() {
  const std::lock_guard lock(counting->mutex);
  return counting->peak;
}

void reset_peak() {
  const std::lock_guard lock(counting->mutex);
  counting->peak = counting->now;
}
}
