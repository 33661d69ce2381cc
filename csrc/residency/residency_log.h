// What happens to resident buckets, and when: for pictures.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace zx {

struct ResidencyEvent {
  enum class Kind : uint8_t { fetch, arrive, release, wait, go_on, step };
  Kind kind;
  int64_t bucket;  // -1: of all
  int64_t time_ns;
  int64_t resident_bytes;
};

// Empty unless somebody asks for it. Not thread-safe.
class ResidencyLog {
 public:
  void set_recording(bool recording) { recording_ = recording; }

  void note(ResidencyEvent::Kind kind, int64_t bucket, size_t resident_bytes) {
    if (!recording_) return;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    events_.push_back({kind, bucket, std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(),
                       static_cast<int64_t>(resident_bytes)});
  }

  std::vector<ResidencyEvent> take() { return std::exchange(events_, {}); }

 private:
  bool recording_ = false;
  std::vector<ResidencyEvent> events_;
};

}  // namespace zx
