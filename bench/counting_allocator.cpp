// torch's CPU allocator with a counter in front: what every thread of a process allocates and frees, workers included.
// Loaded with ctypes by bench/allocator.py.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace {

c10::Allocator* inner = nullptr;
std::mutex mutex;  // of what follows
int64_t now = 0, peak = 0;
// Never deleted: tensors may be freed after static objects are.
auto& bytes_of = *new std::unordered_map<void*, int64_t>;

void free_counted(void* data) {
  if (data == nullptr) return;
  {
    const std::lock_guard lock(mutex);
    now -= bytes_of.extract(data).mapped();
  }
  inner->raw_deleter()(data);
}

struct CountingAllocator final : c10::Allocator {
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
};

}  // namespace

extern "C" {

// Comes before the others. Stays for the life of the process: tensors allocated from now on are freed through it.
void start_counting() {
  if (inner != nullptr) return;
  inner = c10::GetCPUAllocator();
  c10::SetCPUAllocator(new CountingAllocator, /*priority=*/1);
}

int64_t bytes_now() {
  const std::lock_guard lock(mutex);
  return now;
}

// The most at a time since it was last called.
int64_t take_peak() {
  const std::lock_guard lock(mutex);
  return std::exchange(peak, now);
}
}
