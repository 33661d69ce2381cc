// torch's CPU allocator with a counter in front: what every thread of a process allocates and frees, workers included.
// Loaded with ctypes by bench/allocator.py.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace {

struct Counts {
  std::mutex mutex;
  std::unordered_map<void*, int64_t> bytes_of;
  int64_t now = 0;
  int64_t peak = 0;
};

Counts& counts() {
  static auto* made = new Counts;  // tensors may be freed after static objects are
  return *made;
}

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr made = inner_->allocate(bytes);
    void* data = made.release_context();
    if (data == nullptr) return {nullptr, nullptr, &free_counted, made.device()};
    Counts& all = counts();
    const std::lock_guard lock(all.mutex);
    all.bytes_of[data] = static_cast<int64_t>(bytes);
    all.now += static_cast<int64_t>(bytes);
    all.peak = std::max(all.peak, all.now);
    return {data, data, &free_counted, made.device()};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  static CountingAllocator* installed;

 private:
  static void free_counted(void* data) {
    if (data == nullptr) return;
    {
      Counts& all = counts();
      const std::lock_guard lock(all.mutex);
      const auto found = all.bytes_of.find(data);
      all.now -= found->second;
      all.bytes_of.erase(found);
    }
    installed->inner_->raw_deleter()(data);
  }

  c10::Allocator* inner_;
};

CountingAllocator* CountingAllocator::installed = nullptr;

}  // namespace

extern "C" {

// Stays for the life of the process: tensors allocated from now on are freed through it.
void start_counting() {
  if (CountingAllocator::installed != nullptr) return;
  CountingAllocator::installed = new CountingAllocator(c10::GetCPUAllocator());
  c10::SetCPUAllocator(CountingAllocator::installed, /*priority=*/1);
}

int64_t bytes_now() {
  const std::lock_guard lock(counts().mutex);
  return counts().now;
}

int64_t bytes_peak() {
  const std::lock_guard lock(counts().mutex);
  return counts().peak;
}

void reset_peak() {
  const std::lock_guard lock(counts().mutex);
  counts().peak = counts().now;
}
}
