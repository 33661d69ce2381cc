// Pauses between looks at memory that another process writes.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace zx {

// At first others may run, which takes a microsecond. Then a wait is prolonged by a sixteenth of what it took already,
// and no more than a millisecond.
class Pause {
 public:
  using Clock = std::chrono::steady_clock;

  void operator()() {
    if (yields_ < kYields) {
      ++yields_;
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(std::clamp<Clock::duration>(waited() / 16, kShortest, kLongest));
  }
  Clock::duration waited() const { return Clock::now() - start_; }

 private:
  static constexpr int kYields = 64;
  static constexpr std::chrono::microseconds kShortest{20};
  static constexpr std::chrono::microseconds kLongest{1000};
  Clock::time_point start_ = Clock::now();
  int yields_ = 0;
};

}  // namespace zx
