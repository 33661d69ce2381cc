// Adds up how long threads were at something.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace zx {

class Stopwatch {
 public:
  // Counts for as long as it lives.
  class Lap {
   public:
    explicit Lap(Stopwatch& watch) : watch_(watch) {}
    ~Lap() {
      const auto took = std::chrono::steady_clock::now() - start_;
      watch_.total_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
    }
    Lap(const Lap&) = delete;
    Lap& operator=(const Lap&) = delete;

   private:
    Stopwatch& watch_;
    const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  };

  int64_t total_ns() const { return total_ns_; }

 private:
  std::atomic<int64_t> total_ns_ = 0;
};

}  // namespace zx
