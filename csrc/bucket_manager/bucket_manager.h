// Watches autograd for gradients, sends each bucket on its way when its turn comes, and answers the optimizer.
//
//   hooks (hooks.cpp) -> LaunchOrder -> packing list (packing.cpp) -> Flights -> shards
//
// The optimizer talks to it through settle() (settlement.cpp), zero() and the buckets.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bucket_manager/agreement.h"
#include "bucket_manager/bucket.h"
#include "bucket_manager/flights.h"
#include "bucket_manager/gathers.h"
#include "bucket_manager/launch_order.h"
#include "bucket_manager/pass.h"
#include "bucket_manager/process.h"

namespace zx {

// One parameter of a new bucket.
struct SlotSpec {
  std::string name;
  at::Tensor param;
  at::Tensor home;         // its place in `flat`, as a view
  at::Tensor placeholder;  // undefined: p.grad stays whole
  int64_t offset;
};

struct BucketSpec {
  std::vector<SlotSpec> slots;
  at::Tensor flat;  // that the parameters lie in [world * shard_numel]
  at::ScalarType wire_dtype;
  at::ScalarType grad_dtype;  // of p.grad
  int64_t shard_numel;
  int64_t trailer_numel;
  at::Tensor segments;
  int64_t num_straight;  // the first so many slots: see Note [Straight from the gradient]
};

// What settle() found that its caller must act on.
enum class Settled { ready, adopt };

// What the last settle() saw, on any rank.
struct SettledWith {
  bool scaled = false;  // a gradient that mark_scaled() saw
  SlotSet with_grad;
};

struct ManagerOptions {
  bool whole_grads;    // the reduced gradient is gathered into p.grad where backward ends (ZeRO stage 1)
  bool keeps_shards;   // at one address from step to step, for CUDA graphs
  c10::Device device;  // of all parameters
};

// In a forked child whatever changes or waits for something throws: see Note [Forks].
class BucketManager : public std::enable_shared_from_this<BucketManager> {
 public:
  // `exchange`, and the group of `control`, are null for one rank alone.
  BucketManager(std::shared_ptr<Exchange> exchange, Line control, ManagerOptions options);
  ~BucketManager();  // takes the hooks and placeholders away, aborts what is under way

  int64_t add_bucket(BucketSpec spec);

  // Collective. Everything that ranks launched has landed afterwards, on all ranks the same. Throws on all ranks if
  // they disagree about it, or one passes a `refusal`: why it can't go on. Settled::adopt: some rank passed
  // adoptions > 0; make them and call again.
  Settled settle(Place place, int64_t adoptions, const std::string& refusal = "");

  // As Optimizer.zero_grad(); local, and never blocks but for whole gradients after a backward that raised: there it
  // tells the others, who wait at the end of theirs.
  void zero(bool set_to_none);

  // False: gradients stay local and accumulate (no_sync).
  void set_sync(bool sync);

  // Where gradients are whole: this rank's part of p.grad as a shard, for the update; updates `present`.
  at::Tensor take_local_shard(int64_t bucket);
  // The same as pieces of parts(), not defined where there is no gradient; none if all has to be packed.
  std::vector<at::Tensor> take_local_pieces(int64_t bucket);

  // Collective: a few integers on the CPU, combined over the ranks in place, for clip_grad_norm_().
  void all_reduce(const at::Tensor& values, Combine combine);

  // Starts sending this rank's updated parameters of a bucket to all others; in the same order on all ranks.
  void start_gather(int64_t bucket, bool background);
  Gathers& gathers() { return gathers_; }
  std::vector<int64_t> gather_order() const;

  // (bucket, slot) of each parameter that does not lie at home.
  std::vector<std::pair<int64_t, int64_t>> moved() const;

  // The placeholder of this slot was set to zero.
  void mark_zeroed(int64_t bucket, int64_t slot);

  // The scale that clip_grad_norm_() or a GradScaler leaves for step() is for the gradients that there are now.
  void mark_scaled();
  // At the last settle(): whether any rank still held one of these.
  bool holds_scaled() const { return settled_with_.scaled; }
  // After an update: tells autograd of the parameters that the last settle() found a gradient of, so that a backward
  // through their old values raises, as after torch's optimizers. The update itself is below version counters.
  void bump_versions();
  // Grows when gradients are added to those that there are, by any rank's backward.
  int64_t num_added() const { return flights_.num_launched() + num_seen_; }

  // Whether settle() has come after every backward.
  bool settled() const { return !pass_.open && pass_.rounds == 0; }
  int64_t num_slots() const;
  std::vector<int64_t> launch_order() const { return order_.order(); }
  const Bucket& bucket(int64_t index) const { return *buckets_.at(index); }
  const at::Tensor& whole_shard(int64_t index);
  // The own shard's parts, undivided.
  std::vector<Part> parts(int64_t index) const;
  Flights& flights() { return flights_; }
  Exchange* exchange() { return exchange_.get(); }
  int rank() const { return exchange_ ? exchange_->rank() : 0; }
  int world() const { return exchange_ ? exchange_->world() : 1; }

 private:
  // hooks.cpp: on autograd's thread.
  void install_hooks(Bucket& bucket, Slot& slot);
  void remove_hooks(Slot& slot);
  void refuse_other_reducers();
  void before_accumulate(Slot& slot);
  void after_accumulate(Bucket& bucket, Slot& slot);
  void open_pass();
  void on_backward_end();
  void finish_pass(bool own, bool empty);
  void flush_pass();

  // packing.cpp
  void release(int64_t bucket, bool empty);
  std::shared_ptr<Flight> make_flight(const std::shared_ptr<Bucket>& bucket, bool empty);
  at::Tensor take_gradient(Slot& slot, bool& present, bool& replace);
  void note_producer(Bucket& bucket);

  // settlement.cpp
  void launch_round(bool empty);
  void join(const Verdict& verdict, bool empty);
  void abandon(const Verdict& verdict);
  Statement statement(Place place, int64_t adoptions);
  void check(const Verdict& verdict);
  void ask(const char* where, const std::function<void()>& question);
  GradsSeen look_at_grads();
  void exchange_changes();
  void learn_order();
  void learn_gather_order();

  // whole_grads.cpp
  void gather_whole_grads();
  std::vector<at::Tensor> pack_local(Bucket& bucket, int64_t num_straight);
  void agree_on_unsent();
  void forget_reached();

  ProcessMutex mutex_;  // of all below but flights_ and gathers_; hooks may come from several autograd threads
  std::shared_ptr<Exchange> exchange_;
  Agreement agreement_;
  ManagerOptions options_;
  std::vector<std::shared_ptr<Bucket>> buckets_;
  LaunchOrder order_;
  bool sync_ = true;
  SettledWith settled_with_;
  std::atomic<int64_t> num_seen_{0};  // gradients that no flight takes: whole ones, alone
  Pass pass_;
  Flights flights_;
  Gathers gathers_;
};

}  // namespace zx
