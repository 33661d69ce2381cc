// The parts of one optimizer over their shared buckets:
//
//   Backward     when   a bucket leaves: hooks, passes, the order of launches
//   Packing      what   leaves: from p.grad to a flight
//   Synchronizer   together   at a sync point: agreement, and what follows from it
//   Params       the parameters' gathers
//
// Between them are Flights, which moves what was packed, and MeanGrads, which knows where gradients are.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "buckets/buckets.h"
#include "exchange/exchange.h"
#include "grads/backward.h"
#include "grads/flights.h"
#include "grads/mean_grads.h"
#include "grads/synchronizer.h"
#include "params/params.h"

namespace zx {

// One parameter of a new bucket.
struct SlotSpec {
  std::string name;
  at::Tensor param;
  at::Tensor local;        // see Note [Local tensors]
  at::Tensor home;         // its place in `flat`, as a view
  at::Tensor placeholder;  // undefined if p.grad stays whole
  int64_t offset;
};

struct BucketSpec {
  std::vector<SlotSpec> slots;
  at::Tensor flat;  // [shards.numel()], the buffer that the parameters lie in
  at::ScalarType wire_dtype;
  at::ScalarType grad_dtype;  // of p.grad
  double divisor;
  Shards shards;
  at::Tensor segments;
  Subgroup subgroup;
  // How many slots are zero-copy, the first ones, and how many elements of each shard: see Note [Zero-copy from the
  // gradient].
  int64_t num_zero_copy;
  std::vector<int64_t> zero_copy_numels;
};

struct ManagerOptions {
  std::vector<Move> route;  // of gradients, from backward to step()
  bool keeps_shards;        // at one address from step to step, for CUDA graphs
  c10::Device device;       // of all parameters
  bool sharded_params;      // whose memory comes and goes (ZeRO stage 3)
  bool divides;             // sums are divided by other numbers than that of the ranks
};

class BucketManager {
 public:
  // `axes`: an exchange over each axis of the ranks' mesh, the inner one first. All together, like `control`, connect
  // the same ranks.
  using Axes = std::vector<std::shared_ptr<Exchange>>;
  BucketManager(const Axes& axes, const Communicator& control, const ManagerOptions& options);

  // Makes smaller subgroups possible: returns the exchange's place in Subgroup. Must not be called inside a backward.
  int64_t add_subgroup(std::shared_ptr<Exchange> exchange);

  // Takes the gradients of the bucket's parameters from now on. Must not be called inside a backward.
  int64_t add_bucket(BucketSpec spec);

  const Buckets& buckets() const { return *buckets_; }
  const Exchanges& exchanges() const { return *exchanges_; }
  Flights& flights() { return *flights_; }
  Params& params() { return *params_; }
  MeanGrads& grads() { return *grads_; }
  Backward& backward() { return *backward_; }
  Synchronizer& synchronizer() { return *synchronizer_; }
  // The parts of this rank's shard, not cut to fit a cache.
  std::vector<Part> parts(int64_t bucket) const;

 private:
  std::shared_ptr<Buckets> buckets_;
  bool keeps_shards_;
  bool homes_move_;  // see Note [Rooms on an accelerator]
  // Their order matters: the last is destroyed first and removes its hooks, and gathers end before flights are aborted.
  std::shared_ptr<Exchanges> exchanges_;
  std::shared_ptr<ReductionsOfSubgroups> reductions_;
  std::shared_ptr<Flights> flights_;
  std::shared_ptr<Params> params_;
  std::shared_ptr<MeanGrads> grads_;
  std::shared_ptr<Synchronizer> synchronizer_;
  std::shared_ptr<Backward> backward_;
};

}  // namespace zx
