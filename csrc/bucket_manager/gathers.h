// Slices of flat buffers on their way to all ranks, by bucket.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "bucket_manager/bucket.h"
#include "bucket_manager/exchange.h"
#include "bucket_manager/lane.h"
#include "bucket_manager/read_guard.h"

namespace zx {

// In which order forward needs buckets. When every rank has proposed one, rank 0's is agreed.
struct GatherOrder {
  std::vector<int64_t> proposed;  // by this rank; empty once agreed
  std::vector<int64_t> agreed;    // empty: that of the buckets
};

// What arrives, for errors; and the ranges that profilers see.
struct GatherNames {
  const char* what;
  const char* start;
  const char* wait;
};

// start(), guard_reads() and finish() are one thread's; wait() may come from others meanwhile.
//
// Note [Neighbours read late]
// On one machine a slice is not sent: the others read it from where it lies, when they get to it. Until they have,
// whoever writes a parameter has to wait for them, as finish() does before the next step.
class Gathers {
 public:
  // On an accelerator it is the current stream that waits.
  Gathers(GatherNames names, c10::Device device) : names_(names), device_(device) {}

  // Waits for all there are: buffers are whole then, unless a rank is gone.
  ~Gathers();

  // Starts sending this rank's slice of `flat` to all others. `background`: a thread takes the others' in as they come,
  // else whoever waits does.
  void start(const std::shared_ptr<Bucket>& bucket, at::Tensor flat, Exchange& exchange, bool background);

  // Returns when these buckets are whole; those that are not on their way are. Throws, naming the first that is not.
  void wait(const std::vector<int64_t>& buckets);

  // Until all are whole, an operator of this thread waits for what it reads: see Note [Reads wait for what they read].
  // What does not arrive is told by wait() and finish().
  void guard_reads();

  // Waits for all, and until nobody reads this rank's slices any more. Throws the first error.
  void finish();

  // Buckets that nobody has waited for yet, in the order of their start.
  std::vector<int64_t> missing() const;

  // Buckets in the order in which they were waited for since the first start() after the last finish().
  std::vector<int64_t> order_of_use() const;

  GatherOrder& order() { return order_; }
  const GatherOrder& order() const { return order_; }

  // For tests of overlap: nothing arrives but for who waits.
  void set_hold(bool hold) { hold_ = hold; }

 private:
  struct Gather {
    std::shared_ptr<Bucket> bucket;
    at::Tensor flat;
    std::shared_ptr<Pending> pending;
    std::once_flag once{};  // who comes first takes it in: the thread, or who waits
    std::string error{};
    std::once_flag given_once{};
    std::string given_error{};
    std::atomic<bool> given{false};     // on the CPU: nobody reads this rank's slice any more
    std::vector<c10::Stream> waited{};  // on an accelerator
    bool used = false;                  // somebody waited
  };

  void take_in(Gather& gather) const;
  void give(Gather& gather) const;
  void receive(Gather& gather) const;
  void wait_on_stream(Gather& gather) const;
  void wait_for(Gather& gather);
  void before_read(const at::Tensor& tensor, const ReadGuard::Use& use);
  bool all_done() const;
  [[noreturn]] void fail(const Gather& gather, const std::string& reason) const;
  template <class Body>
  void naming(const Gather& gather, const Body& body) const;

  GatherNames names_;
  c10::Device device_;
  GatherOrder order_;
  bool hold_ = false;
  mutable std::mutex mutex_;                        // of what follows, and of `waited` and `used`
  std::vector<std::shared_ptr<Gather>> under_way_;  // in the order of their start
  std::vector<int64_t> order_of_use_;
  std::thread::id guarded_;
  std::optional<ReadGuard> guard_;  // the guarded thread's
  Lane lane_{"zerox gather"};
};

}  // namespace zx
