// Slices of flat buffers on their way to all ranks, by bucket.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "locks.h"
#include "params/gather.h"
#include "params/read_guard.h"
#include "workers/process.h"
#include "workers/stopwatch.h"
#include "workers/worker.h"

namespace zx {

// One thread calls start(), guard_reads() and finish(); other threads may call wait() meanwhile. In a forked child
// start() and finish() throw, and so does wait() for what had not arrived before the fork: see Note [Forks].
class Gathers {
 public:
  explicit Gathers(GatherNames names) : names_(names) {}

  // Waits for all gathers: buffers are whole afterwards, unless a rank is gone.
  ~Gathers();

  // Starts sending this rank's slice of `flat` to all others. `background`: a thread receives the others' slices as
  // they come; without it the first thread that waits does.
  // `starts`: of the slices in it, see Exchange.
  void start(const std::shared_ptr<Bucket>& bucket, at::Tensor flat, at::IntArrayRef starts, Exchange& exchange,
             bool background);

  // Returns when these buckets are whole. A bucket that is not on its way is whole. Throws, naming the first that is
  // not.
  void wait(const std::vector<int64_t>& buckets);

  // Until all are whole, operators wait for what they read: see Note [Reads wait for what they read]. wait() and
  // finish() report what does not arrive.
  void guard_reads();

  // Waits for all gathers, and until no other rank reads this rank's slices any more. Throws the first error, each time
  // it is called.
  void finish();

  // Buckets that have not been waited for yet, in the order of their start.
  std::vector<int64_t> missing() const;

  // Buckets in the order in which they were waited for since the first start() after the last finish().
  std::vector<int64_t> order_of_use() const;

  // How long callers of the above, and readers that guard_reads() holds up, have been at it.
  int64_t waited_ns() const { return waited_->total_ns(); }

  // For tests of overlap: nothing arrives until something waits for it.
  void hold_back(bool hold) { is_held_back_ = hold; }

 private:
  using All = std::vector<std::shared_ptr<Gather>>;
  All under_way() const;
  void in_background(void (Gather::*what)(), const std::shared_ptr<Gather>& gather);

  Process process_;
  GatherNames names_;
  bool is_held_back_ = false;
  const std::shared_ptr<Stopwatch> waited_ = std::make_shared<Stopwatch>();  // the guard may live longer
  mutable Mutex<LockRank::gathers> mutex_;                                   // of the next two
  All under_way_;                                                            // in the order of their start
  std::vector<int64_t> used_;
  std::optional<ReadGuard> guard_;
  Worker worker_{"zerox gather"};
};

}  // namespace zx
