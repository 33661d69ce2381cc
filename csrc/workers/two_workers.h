// Packs and reduces flights in the order in which they were launched. This is plain C++, unit-tested without torch and
// under the thread sanitizer: Flights knows what a flight carries.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "locks.h"
#include "workers/airborne.h"
#include "workers/worker.h"

namespace zx {

// Note [Two workers]
// Packing and reduction run on two threads beside autograd's, each in launch order. So launching a bucket costs
// backward a queue entry, and nothing in backward waits for the wire. At most two flights have buffers at a time: the
// next one is packed when the first has been reduced, and its gradients stay where they are until then.
//
// On an accelerator whose backend works on streams (NCCL), the streams are the workers: the thread that launches
// enqueues packing and reduction there at once. If the backend works on the host (gloo), the threads stay, and each has
// a stream.
//
// A `Flight` has describe(), and `pending`: a pointer to the messages that it waits for. Their abort() wakes a waiting
// thread.
template <class Flight>
class TwoWorkers {
 public:
  using Task = std::function<void()>;
  using FlightTask = std::function<void(Flight&)>;

  // `pack` and `reduce` are called once for each flight, with no lock held, even after an error. They must not throw:
  // see attempt(). Without threads, the thread that launches runs them.
  TwoWorkers(bool has_threads, FlightTask pack, FlightTask reduce)
      : has_threads_(has_threads), pack_(std::move(pack)), reduce_(std::move(reduce)) {}

  // Aborts what is under way, and ends the threads.
  ~TwoWorkers() { airborne_.abort(); }

  // Called by one thread at a time. `small`: the flight waits for no other rank, and waking the workers would take
  // longer than the flight itself. The caller then does the work of the workers, unless other flights are in the air.
  void launch(std::shared_ptr<Flight> flight, bool small = false) {
    const bool here = airborne_.add(flight) && small;
    auto task = [this, here, flight = std::move(flight)] { pack(flight, here); };
    if (held_back_.on) {
      held_back_.tasks.emplace_back(std::move(task));
    } else if (here) {
      task();
    } else {
      post(pack_worker_, std::move(task));
    }
  }

  // Runs `task` after all flights launched so far have been reduced.
  void after_reduction(Task task) {
    start_held();
    if (!airborne_.add_task()) {  // at once, so that memory is free when zero_grad() returns
      task();
      return;
    }
    post(pack_worker_, [this, task = std::move(task)] {
      post(reduce_worker_, [this, task] {
        task();
        airborne_.end_task();
      });
    });
  }

  // Waits until at most `most` have not been reduced, or nothing will be reduced any more. See Patience.
  WaitEnd await_all_but(int64_t most, const Patience& patience) {
    if (held_back_.on) return WaitEnd::few;
    check_may_wait("the reduction of flights");
    return airborne_.await_all_but(most, patience);
  }

  // Waits until all have been reduced. Returns the first error, now and on every later call; empty if there was none.
  std::string drain() {
    start_held();
    pack_worker_.drain();
    reduce_worker_.drain();
    return airborne_.error();
  }

  // See Airborne.
  std::string trouble() const { return airborne_.trouble(); }
  int64_t num_reduced() const { return airborne_.num_reduced(); }
  int64_t num_launched() const { return airborne_.num_launched(); }
  bool has_threads() const { return has_threads_; }
  // For tests of overlap: holds every flight back until drain() or after_reduction().
  void hold_back(bool hold) { held_back_.on = hold; }

  // For `pack` and `reduce`: runs `body`, and remembers what it throws if that is the first error.
  template <class Body>
  void attempt(const Flight& flight, const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      airborne_.fail(flight, error.what());
    } catch (...) {
      airborne_.fail(flight, "unknown error");
    }
  }

  bool failed() const { return airborne_.failed(); }

  // For `pack`: notes that the flight's messages are on the wire.
  template <class Pending>
  void set_pending(Flight& flight, Pending pending) {
    airborne_.set_pending(flight, std::move(pending));
  }

 private:
  struct HeldBack {
    bool on = false;
    std::deque<Task> tasks;
  };

  void post(Worker& worker, Task task) {
    if (has_threads_) {
      worker.post(std::move(task));
    } else {
      task();
    }
  }

  void start_held() {
    for (auto& task : held_back_.tasks) post(pack_worker_, std::move(task));
    held_back_.tasks.clear();
  }

  void pack(const std::shared_ptr<Flight>& flight, bool here) {
    buffers_.acquire();
    pack_(*flight);
    if (here) {
      reduce(flight);
    } else {
      post(reduce_worker_, [this, flight] { reduce(flight); });
    }
  }

  void reduce(const std::shared_ptr<Flight>& flight) {
    reduce_(*flight);
    airborne_.end(*flight);
    buffers_.release();
  }

  bool has_threads_;  // if not, the thread that posts a task runs it
  FlightTask pack_;
  FlightTask reduce_;
  Airborne<Flight> airborne_;
  HeldBack held_back_;
  Permits buffers_{2};
  Worker reduce_worker_{"zerox land"};  // destroyed after the worker that posts to it
  Worker pack_worker_{"zerox pack"};
};

}  // namespace zx
