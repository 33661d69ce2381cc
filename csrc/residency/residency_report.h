// What resident buckets have come to: figures, events, and the first error.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "residency/residency_log.h"

namespace zx {

struct ResidentCounts {
  int64_t fetches = 0;        // buckets that were fetched
  int64_t fetched_bytes = 0;  // of other ranks' shards
  int64_t faults = 0;         // reads and writes that no operator announced
  int64_t waits = 0;          // reads that had to wait for a bucket
  int64_t prefetches = 0;     // among the fetches: those ahead of the read
  int64_t waited_ns = 0;      // by those reads, added up over threads
};

// Not thread-safe.
class ResidencyReport {
 public:
  ResidentCounts& counts() { return counts_; }
  ResidencyLog& log() { return log_; }

  // What could not be fetched, or was written and is lost, since the last take; empty if nothing. The first error
  // stays.
  void fail(const std::string& failure) {
    if (failure_.empty()) failure_ = failure;
  }
  const std::string& failure() const { return failure_; }
  std::string take_failure() { return std::exchange(failure_, {}); }

 private:
  ResidentCounts counts_;
  ResidencyLog log_;
  std::string failure_;
};

}  // namespace zx
