// Where gradients are between backward and step(): what a flight takes of p.grad, what stays there, and where step()
// reads the mean.
//
//   ShardedGrads    each rank has its shard of the mean, and p.grad is a placeholder (ZeRO stages 2 and 3)
//   GatheredGrads   the mean is gathered into p.grad where backward ends (ZeRO stage 1)
//   WholeGrads      with one rank alone: p.grad, as autograd leaves it, is the mean (ZeRO stage 1)
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "buckets/buckets.h"
#include "buckets/slot_set.h"
#include "exchange/exchange.h"
#include "grads/agreement.h"
#include "grads/flights.h"
#include "grads/placements.h"
#include "grads/reduced_shards.h"

namespace zx {

// One move of gradients on their way to step(). A route is a list of moves, in order.
enum class Move : uint8_t { reduce_scatter, all_gather };

// What a flight takes from one slot.
struct Taken {
  at::Tensor source{};  // in the order of the parameter's memory; undefined if there is nothing to copy
  bool present = false;
  bool replace = false;
  std::string refusal{};  // why p.grad was not taken
};

// What a look at all gradients finds: see LocalStatus.
struct GradsSeen {
  bool unsent = false;
  bool changed = false;
  bool scaled = false;
  bool touched = false;  // the user wrote to p.grad since it became the mean
  SlotSet with_grad{};
  std::string refusal{};  // why a gradient can't be sent; empty if all can
};

// What all three work with.
struct GradContext {
  std::shared_ptr<Buckets> buckets;
  std::shared_ptr<Exchanges> exchanges;
  std::shared_ptr<Flights> flights;
};

class MeanGrads {
 public:
  explicit MeanGrads(GradContext context)
      : context_(std::move(context)),
        placements_(context_.buckets),
        reduced_shards_(context_.buckets, context_.flights) {}
  virtual ~MeanGrads() = default;
  MeanGrads(const MeanGrads&) = delete;
  MeanGrads& operator=(const MeanGrads&) = delete;

  // ---- on autograd's thread

  // Whether backward sends gradients at all. If not, it only counts them.
  virtual bool sends() const { return true; }
  void count_gradient() { ++num_counted_; }
  int64_t num_counted() const { return num_counted_; }
  // Whether before_accumulate() is to be called for this bucket.
  virtual bool precedes_accumulation(const Bucket& /*bucket*/) const { return false; }
  virtual void before_accumulate(const Bucket& /*bucket*/, Slot& /*slot*/, const Locked& /*lock*/) {}
  // Called when autograd has written p.grad. `sync`: the gradient leaves with this backward.
  virtual void accumulated(Slot& /*slot*/, bool /*sync*/, const Locked& /*lock*/) {}
  // Whether p.grad is sent from where it lies, so that nothing may be added to it meanwhile.
  virtual bool leaves_in_place() const { return false; }
  // Whether, if no hook saw what backward wrote, p.grad may be neither the mean nor all that is this rank's own.
  virtual bool may_be_unseen(const Slot& /*slot*/) const { return false; }
  // Whether all ranks synchronize where backward ends.
  virtual bool syncs_after_backward() const { return shows_all_; }
  // Has all ranks synchronize where backward ends, so that p.grad is there on all if any has a gradient.
  void show_all() { shows_all_ = true; }
  // Called where backward ended. `seen`: the slots whose gradient some rank has.
  virtual void show(const SlotSet& /*seen*/) {}

  // ---- for a flight

  // `grad`: p.grad as a plain tensor, see local_grad().
  virtual Taken take(const Bucket& bucket, Slot& slot, const at::Tensor& grad, const Locked& lock) = 0;

  // ---- at a sync point

  // See Placements.
  SlotSet seen_placements() const { return placements_.seen(); }
  std::string learn_placements(const SlotSet& seen) { return placements_.learn(seen); }
  std::vector<int64_t> partial(int64_t bucket) const { return placements_.partial(bucket); }
  // `rounds`: how often all buckets were launched since the last step.
  virtual GradsSeen look(int64_t rounds, const Locked& lock) = 0;
  // Collective: makes what was launched into what step() reads.
  // `scale`: what the new mean is multiplied by, where it goes into p.grad.
  virtual void complete(int64_t /*rounds*/, double /*scale*/, Agreement& /*agreement*/) {}
  // True: this rank follows the others and sends zeros, whatever its p.grad holds.
  virtual void set_rests(bool /*rests*/) {}
  // Whether p.grad held the mean, and a backward since then has found something else there: None, zeros, or what was
  // put there by hand.
  virtual bool has_lost_mean() const { return false; }
  // Does what zero_grad() does, if p.grad holds the mean of an older step.
  virtual void forget_old(int64_t /*rounds*/) {}
  // Collective: calls `launch` to send what, on some rank, no flight took.
  virtual void send_rest(Agreement& /*agreement*/, const std::function<void()>& launch) { launch(); }
  // Collective: tells owners what some rank discarded since the last flight. All flights have been reduced.
  virtual void exchange_changes(Agreement& /*agreement*/) {}
  // Called when rounds are counted anew.
  virtual void start_over(bool /*is_step*/) {}

  // Does what Optimizer.zero_grad() does. `rounds` as above.
  void zero(bool set_to_none, int64_t rounds);
  // Notes that the scale that clip_grad_norm_() or a GradScaler leaves for step() is for the gradients that exist now.
  void mark_scaled();
  // Multiplies p.grad by a scalar, where it holds the mean: of these slots, or of all.
  using Slots = std::optional<std::vector<int64_t>>;
  virtual void scale(int64_t /*bucket*/, const at::Tensor& /*factor*/, const Slots& /*slots*/) {}
  // See ReducedShards.
  void do_in_place(std::vector<InPlace> calls) { reduced_shards_.do_in_place(std::move(calls)); }
  void forget_limbs(int64_t bucket) { reduced_shards_.forget_limbs(bucket); }
  void mark_zeroed(int64_t bucket, int64_t slot);      // zero_() was called on this slot's placeholder
  bool is_zeroed(int64_t bucket, int64_t slot) const;  // and no flight has told its owners yet

  // ---- for step(), after Synchronizer::sync()

  // This rank's shard of the mean [Bucket::own_numel()]; undefined while no slot has a gradient.
  virtual at::Tensor shard(int64_t bucket) = 0;
  // The same shard as one tensor for each of parts(), not copied; undefined if a part has no gradient. Empty if the
  // shard is one tensor.
  virtual std::vector<at::Tensor> shard_by_part(int64_t bucket) = 0;
  // See ReducedShards.
  int64_t version(int64_t bucket) const { return reduced_shards_.version(bucket); }
  std::vector<at::Tensor> reduced(int64_t bucket) const { return reduced_shards_.tensors(bucket); }
  at::Tensor present(int64_t bucket) const { return reduced_shards_.present(bucket); }
  // The exact sum of squares over the shard; undefined when unknown.
  virtual at::Tensor limbs(int64_t /*bucket*/) { return {}; }

 protected:
  // Whether zero_grad(set_to_none=False) also drops what has been reduced.
  virtual bool zeros_are_in_grad() const = 0;
  Buckets& buckets() const { return *context_.buckets; }

  const GradContext context_;

 private:
  Placements placements_;
  ReducedShards reduced_shards_;
  std::atomic<int64_t> num_counted_{0};
  std::atomic<bool> shows_all_{false};
};

// Collective: of `each` bytes for every slot, in order, their maxima over the ranks of the slot's subgroup.
std::vector<uint8_t> told_in_subgroups(const Buckets& buckets, const std::vector<uint8_t>& own, int64_t each,
                                       Agreement& agreement);

// `route`: the moves from p.grad to where step() reads.
std::shared_ptr<MeanGrads> make_mean_grads(const std::vector<Move>& route, bool alone, GradContext context);

}  // namespace zx
