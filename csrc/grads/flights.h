// All flights of one bucket manager, and how they are packed, sent and reduced. See Note [Two workers] in
// two_workers.h.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "grads/flight.h"
#include "grads/reduction.h"
#include "workers/process.h"
#include "workers/stopwatch.h"
#include "workers/streams.h"
#include "workers/two_workers.h"

namespace zx {

class Flights {
 public:
  // The destructor aborts what is under way.
  // `waits_on_host`: whether sending or receiving may.
  Flights(std::shared_ptr<Reduction> reduction, c10::Device device, bool waits_on_host);

  void launch(std::shared_ptr<Flight> flight);

  // Runs `task` after all flights launched so far have been reduced.
  void after_reduction(std::function<void()> task);

  // Waits until all have been reduced; on an accelerator the current stream does. Throws the first error, now and on
  // every later call. Throws in a forked child, which has no workers.
  void await_all();

  // Waits until at most `most` have not been reduced. See Patience.
  WaitEnd await_all_but(int64_t most, const Patience& patience) {
    const Stopwatch::Lap lap(waited_);
    return workers_.await_all_but(most, patience);
  }
  // How long threads have been in there.
  int64_t waited_ns() const { return waited_.total_ns(); }

  int64_t num_reduced() const { return workers_.num_reduced(); }
  int64_t num_launched() const { return workers_.num_launched(); }
  // Tells what is known to be wrong: the first error, or the buckets that have not been reduced; empty if nothing is.
  std::string trouble() { return workers_.trouble(); }
  // For tests of overlap: holds every flight back until await_all() is called.
  void hold_back(bool hold) { workers_.hold_back(hold); }

  const Reduction& reduction() const { return *reduction_; }
  Streams* streams() { return streams_ ? &*streams_ : nullptr; }  // null on the CPU

 private:
  void pack(Flight& flight);
  void reduce(Flight& flight);
  void retain_sources(Flight& flight);  // after all that the pack stream was given so far

  Process process_;
  std::shared_ptr<Reduction> reduction_;
  std::vector<at::Tensor> abandoned_;  // the reduce worker's: sent before an error, and others may still read it
  std::optional<Streams> streams_;
  Stopwatch waited_;
  TwoWorkers<Flight> workers_;  // destroyed first: its threads use the others
};

}  // namespace zx
