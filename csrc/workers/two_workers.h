// Packs and reduces flights in the order in which they were launched, and knows which ones are in the air, and the
// first error. This is plain C++, unit-tested without torch and under the thread sanitizer: Flights knows what a flight
// carries.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "locks.h"
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
  ~TwoWorkers() {
    const std::lock_guard lock(sky_.mutex);
    sky_.aborted = true;
    for (const auto& flight : sky_.airborne) {
      if (flight && flight->pending) flight->pending->abort();
    }
  }

  // Called by one thread at a time. `small`: the flight waits for no other rank, and waking the workers would take
  // longer than the flight itself. The caller then does the work of the workers, unless other flights are in the air.
  void launch(std::shared_ptr<Flight> flight, bool small = false) {
    ++num_launched_;
    bool is_first = false;
    {
      const std::lock_guard lock(sky_.mutex);
      is_first = sky_.airborne.empty();
      sky_.airborne.push_back(flight);
    }
    const bool here = small && is_first;
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
    {
      std::unique_lock lock(sky_.mutex);
      if (sky_.airborne.empty()) {  // at once, so that memory is free when zero_grad() returns
        lock.unlock();
        task();
        return;
      }
      sky_.airborne.push_back(nullptr);  // the task has a place in line: a later one must not overtake it
    }
    post(pack_worker_, [this, task = std::move(task)] {
      post(reduce_worker_, [this, task] {
        task();
        const std::lock_guard lock(sky_.mutex);
        sky_.airborne.pop_front();
      });
    });
  }

  // Waits until at most `most` have not been reduced, or nothing will be reduced any more. Returns false if none is
  // reduced for `patience`.
  bool await_all_but(int64_t most, std::chrono::milliseconds patience) {
    if (held_back_.on) return true;
    check_may_wait("the reduction of flights");
    std::unique_lock lock(sky_.mutex);
    while (num_launched_ - num_reduced_ > most && sky_.error.empty() && !sky_.aborted) {
      const int64_t before = num_reduced_;
      if (!sky_.reduced.wait_for(lock, patience, [this, before] { return num_reduced_ > before; })) return false;
    }
    return true;
  }

  // Waits until all have been reduced. Returns the first error, now and on every later call; empty if there was none.
  std::string drain() {
    start_held();
    pack_worker_.drain();
    reduce_worker_.drain();
    const std::lock_guard lock(sky_.mutex);
    return sky_.error;
  }

  // Tells what is known to be wrong: the first error, or what has not been reduced; empty if nothing is.
  std::string trouble() {
    const std::lock_guard lock(sky_.mutex);
    if (!sky_.error.empty()) return sky_.error;
    std::string text;
    for (const auto& flight : sky_.airborne) {
      if (flight) text += (text.empty() ? "still awaited: " : ", ") + flight->describe();
    }
    return text;
  }

  bool has_threads() const { return has_threads_; }
  int64_t num_reduced() const { return num_reduced_; }
  int64_t num_launched() const { return num_launched_; }
  // For tests of overlap: holds every flight back until drain() or after_reduction().
  void hold_back(bool hold) { held_back_.on = hold; }

  // For `pack` and `reduce`: runs `body`, and remembers what it throws if that is the first error.
  template <class Body>
  void attempt(const Flight& flight, const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      fail(flight, error.what());
    } catch (...) {
      fail(flight, "unknown error");
    }
  }

  bool failed() {
    const std::lock_guard lock(sky_.mutex);
    return !sky_.error.empty() || sky_.aborted;
  }

  // For `pack`: notes that the flight's messages are on the wire.
  template <class Pending>
  void set_pending(Flight& flight, Pending pending) {
    const std::lock_guard lock(sky_.mutex);
    flight.pending = std::move(pending);
    if (sky_.aborted) flight.pending->abort();
  }

 private:
  struct Sky {
    Mutex<LockRank::sky> mutex;  // of the three below, and of each flight's `pending`
    Condition reduced;
    std::deque<std::shared_ptr<Flight>> airborne;  // launched and not reduced, in order; null for a task
    std::string error;                             // the first one
    bool aborted = false;
  };
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
    {
      const std::lock_guard lock(sky_.mutex);
      flight->pending = nullptr;
      sky_.airborne.pop_front();
      ++num_reduced_;
    }
    sky_.reduced.notify_all();
    buffers_.release();
  }

  void fail(const Flight& flight, const std::string& reason) {
    const std::lock_guard lock(sky_.mutex);
    if (!sky_.error.empty() || sky_.aborted) return;
    sky_.error = "zerox: the gradients of " + flight.describe() + " did not arrive from all ranks: " + reason;
  }

  bool has_threads_;  // if not, the thread that posts a task runs it
  FlightTask pack_;
  FlightTask reduce_;
  std::atomic<int64_t> num_launched_{0};
  std::atomic<int64_t> num_reduced_{0};
  Sky sky_;
  HeldBack held_back_;
  Permits buffers_{2};
  Worker reduce_worker_{"zerox land"};  // destroyed after the worker that posts to it
  Worker pack_worker_{"zerox pack"};
};

}  // namespace zx
