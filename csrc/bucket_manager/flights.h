// All flights of one bucket manager: packs, sends, lands them, in the order in which they were launched.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "bucket_manager/flight.h"
#include "bucket_manager/lane.h"
#include "bucket_manager/streams.h"

namespace zx {

// Note [Two lanes]
// Packing and landing run on two threads beside autograd's, each in launch order, so that launching a bucket costs
// backward a queue entry and nothing in backward waits for the wire. At most two flights have buffers at a time: the
// next one is packed when the first has landed, and its gradients stay where they are until then.
//
// On an accelerator whose backend works on streams (NCCL) the streams are the lanes: packing and landing are only put
// in line there, at once, by the thread that launches. Where the backend works on the host (gloo) the threads stay, and
// each has a stream.
class Flights {
 public:
  // `exchange` is null for one rank alone: flights then land as they are packed.
  Flights(std::shared_ptr<Exchange> exchange, c10::Device device);
  ~Flights();  // aborts what is under way

  void launch(std::shared_ptr<Flight> flight);

  // Runs `task` after all flights launched so far have landed.
  void after_landing(std::function<void()> task);

  // Waits until all have landed; on an accelerator the current stream does. Throws what went wrong first, now and on
  // every later call.
  void land();

  int64_t num_landed() const { return num_landed_; }
  int64_t num_launched() const { return num_launched_; }
  // What is known to be wrong: the first error, or the buckets that have not landed; empty if there is nothing.
  std::string trouble();
  // For tests of overlap: holds every flight back until land() is called.
  void set_hold(bool hold) { held_.on = hold; }

  Streams* streams() { return streams_ ? &*streams_ : nullptr; }  // null on the CPU

 private:
  struct Sky {
    std::mutex mutex;                              // of the three below
    std::deque<std::shared_ptr<Flight>> airborne;  // launched and not landed, in order; null: a task
    std::string error;                             // what went wrong first
    bool aborted = false;
  };
  struct HeldBack {
    bool on = false;
    std::deque<std::function<void()>> tasks;
  };

  void pack(const std::shared_ptr<Flight>& flight);
  void arrive(const std::shared_ptr<Flight>& flight);
  void reduce(Bucket& bucket, Flight& flight);
  void fail(const std::shared_ptr<Flight>& flight);
  void start_held();
  bool failed();
  void post(Lane& lane, std::function<void()> task);

  std::shared_ptr<Exchange> exchange_;
  std::optional<Streams> streams_;
  bool has_threads_;  // else whoever posts a task runs it
  std::atomic<int64_t> num_launched_{0};
  std::atomic<int64_t> num_landed_{0};
  Sky sky_;
  HeldBack held_;
  Slots buffers_{2};
  Lane land_lane_;  // destroyed after the lane that posts to it
  Lane pack_lane_;
};

}  // namespace zx
