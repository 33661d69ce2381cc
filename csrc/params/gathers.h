// Slices of flat buffers on their way to all ranks, by bucket.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "lanes/lane.h"
#include "lanes/process.h"
#include "params/gather.h"
#include "params/read_guard.h"

namespace zx {

// start(), guard_reads() and finish() are one thread's; wait() may come from others meanwhile. In a forked child only
// wait() does not throw, for what had arrived before: see Note [Forks].
class Gathers {
 public:
  explicit Gathers(GatherNames names) : names_(names) {}

  // Waits for all there are: buffers are whole then, unless a rank is gone.
  ~Gathers();

  // Starts sending this rank's slice of `flat` to all others. `background`: a thread takes the others' in as they come,
  // else whoever waits does.
  void start(const std::shared_ptr<Bucket>& bucket, at::Tensor flat, Exchange& exchange, bool background);

  // Returns when these buckets are whole; those that are not on their way are. Throws, naming the first that is not.
  void wait(const std::vector<int64_t>& buckets);

  // Until all are whole, operators wait for what they read: see Note [Reads wait for what they read]. What does not
  // arrive is told by wait() and finish().
  void guard_reads();

  // Waits for all, and until nobody reads this rank's slices any more. Throws the first error, each time it is called.
  void finish();

  // Buckets that nobody has waited for yet, in the order of their start.
  std::vector<int64_t> missing() const;

  // Buckets in the order in which they were waited for since the first start() after the last finish().
  std::vector<int64_t> order_of_use() const;

  // For tests of overlap: nothing arrives but for who waits.
  void set_hold(bool hold) { hold_ = hold; }

 private:
  using All = std::vector<std::shared_ptr<Gather>>;
  All under_way() const;
  void in_background(void (Gather::*what)(), const std::shared_ptr<Gather>& gather);

  Process process_;
  GatherNames names_;
  bool hold_ = false;
  mutable std::mutex mutex_;  // of the next two
  All under_way_;             // in the order of their start
  std::vector<int64_t> used_;
  std::optional<ReadGuard> guard_;
  Lane lane_{"zerox gather"};
};

}  // namespace zx
