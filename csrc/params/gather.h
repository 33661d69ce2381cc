// A bucket's slices on their way to all ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "buckets/bucket.h"
#include "exchange/exchange.h"
#include "locks.h"

namespace zx {

// The name of what arrives, for errors, and the names of the ranges that profilers see.
struct GatherNames {
  const char* what;
  const char* start;
  const char* wait;
};

// Note [Neighbours read late]
// On one machine a slice is not sent: neighbours read it from where it lies, when they get to it. Before a parameter is
// written, its writer has to wait until they have read it, as finish() does before the next step.

// Any thread may call any of these.
class Gather {
 public:
  // Starts sending this rank's slice of `flat` to all others. On an accelerator the current stream does the waiting.
  // `starts`: of the slices in it, see Exchange.
  Gather(GatherNames names, std::shared_ptr<Bucket> bucket, at::Tensor flat, at::IntArrayRef starts,
         Exchange& exchange);

  // Returns when `flat` is whole; on an accelerator, when it is whole for the current stream. Throws, naming the
  // parameters, if it never will be. `is_use`: `flat` is known to be read next.
  void wait(bool is_use = true);

  // On the CPU: receives the slices without counting as a use. Never throws.
  void take_in();
  // Does the same, and returns when no other rank reads this rank's slice any more. Never throws.
  void give();

  // To be called after wait(). Returns when no other rank reads this rank's slice any more. Throws as wait() does.
  void wait_for_readers();

  // In a forked child: throws, naming the parameters, unless `flat` was whole when the child was made.
  void check_arrived() const;

  // False if there was nothing to send.
  bool is_under_way() const { return pending_ != nullptr; }

  int64_t bucket() const { return bucket_->index; }
  std::string describe() const { return bucket_->describe(); }
  const at::Tensor& flat() const { return flat_; }

  int64_t first_wait() const { return first_wait_; }  // 0 before the first wait; a later wait has a larger number
  bool on_host() const { return flat_.device().is_cpu(); }
  bool has_arrived() const { return on_host() && arrival_ != Arrival::on_its_way && error_.empty(); }
  bool is_over() const { return on_host() && first_wait_ != 0 && arrival_ == Arrival::given; }

 private:
  void receive();
  void wait_on_stream();
  std::string doing_what() const;
  [[noreturn]] void fail(const std::string& reason) const;

  GatherNames names_;
  std::shared_ptr<Bucket> bucket_;
  at::Tensor flat_;
  std::shared_ptr<Pending> pending_;
  std::once_flag taken_in_;  // by the first thread that comes
  std::string error_;
  std::once_flag given_once_;
  std::string given_error_;
  enum class Arrival { on_its_way, taken_in, given };
  std::atomic<Arrival> arrival_{Arrival::on_its_way};
  std::atomic<int64_t> first_wait_{0};
  Mutex<LockRank::gather> mutex_;    // on an accelerator: of `waited_`, and of `error_`
  std::vector<c10::Stream> waited_;  // streams that have waited for the arrival
};

}  // namespace zx
