// All flights of one bucket manager: what packing, sending and landing them means. See Note [Two lanes] in two_lanes.h.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bucket_manager/flight.h"
#include "bucket_manager/process.h"
#include "bucket_manager/streams.h"
#include "bucket_manager/two_lanes.h"

namespace zx {

class Flights {
 public:
  // `exchange` is null for one rank alone: flights then land as they are packed.
  // The destructor aborts what is under way.
  Flights(std::shared_ptr<Exchange> exchange, c10::Device device);

  void launch(std::shared_ptr<Flight> flight);

  // Runs `task` after all flights launched so far have landed.
  void after_landing(std::function<void()> task);

  // Waits until all have landed; on an accelerator the current stream does. Throws what went wrong first, now and on
  // every later call.
  // Throws in a forked child, which has no lanes.
  void land();

  int64_t num_landed() const { return lanes_.num_landed(); }
  int64_t num_launched() const { return lanes_.num_launched(); }
  // What is known to be wrong: the first error, or the buckets that have not landed; empty if there is nothing.
  std::string trouble() { return lanes_.trouble(); }
  // For tests of overlap: holds every flight back until land() is called.
  void set_hold(bool hold) { lanes_.set_hold(hold); }

  // Elements of `bytes` each that a part of a shard may have: all, or where neighbours are read, what a cache holds.
  int64_t most_in_a_part(int64_t bytes) const;

  Streams* streams() { return streams_ ? &*streams_ : nullptr; }  // null on the CPU

 private:
  void pack(Flight& flight);
  void land(Flight& flight);
  void reduce(Bucket& bucket, Flight& flight);
  std::vector<at::Tensor> slices(const Flight& flight, const std::vector<Exchange::Messages>& messages, size_t message,
                                 int64_t start, int64_t numel);

  Process process_;
  std::shared_ptr<Exchange> exchange_;
  // The land lane's: what it has read from each neighbour; and what was sent when something went wrong, as others may
  // go on reading it.
  std::vector<at::Tensor> scratch_;
  std::vector<at::Tensor> abandoned_;
  std::optional<Streams> streams_;
  TwoLanes<Flight> lanes_;  // destroyed first: its threads use the others
};

}  // namespace zx
