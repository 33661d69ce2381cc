// Which bucket an address of the host is in.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

namespace zx {

// Any thread may look, without a lock. Only one at a time may change the ranges.
class AddressMap {
 public:
  struct Range {
    const char* start;
    const char* stop;
    mutable int64_t bucket;  // -1 once it is forgotten
  };

  AddressMap() { replace({}); }

  // Readers may still look at an old snapshot, so all are kept.
  void replace(std::vector<Range> ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.start < b.start; });
    snapshots_.push_back(std::make_unique<const std::vector<Range>>(std::move(ranges)));
    now_ = snapshots_.back().get();
  }

  // Nobody's any more.
  void forget(const void* address) {
    if (const Range* found = range_at(address)) std::atomic_ref(found->bucket).store(-1, std::memory_order_relaxed);
  }

  // The bucket that the address is in, or -1. This is asked for each argument of each operator.
  int64_t at(const void* address) const {
    const Range* found = range_at(address);
    return found == nullptr ? -1 : std::atomic_ref(found->bucket).load(std::memory_order_relaxed);
  }

 private:
  const Range* range_at(const void* address) const {
    const auto* place = static_cast<const char*>(address);
    const std::vector<Range>& all = *now_.load(std::memory_order_acquire);
    const auto after = std::upper_bound(all.begin(), all.end(), place,
                                        [](const char* address, const Range& each) { return address < each.start; });
    if (after == all.begin()) return nullptr;
    const Range& found = *std::prev(after);
    return place < found.stop ? &found : nullptr;
  }

  std::vector<std::unique_ptr<const std::vector<Range>>> snapshots_;
  std::atomic<const std::vector<Range>*> now_;
};

}  // namespace zx
