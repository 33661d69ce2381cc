// TwoWorkers with a fake exchange, whose messages arrive from another thread after random delays.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "workers/two_workers.h"

namespace two_workers {

using namespace std::chrono_literals;

// A message: some numbers that another thread writes. wait() throws if the sender is gone, or if it was aborted.
class FakePending {
 public:
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    if (!error_.empty()) throw std::runtime_error(error_);
  }
  void abort() { finish("aborted"); }
  void finish(const std::string& error = "") {
    {
      const std::lock_guard lock(mutex_);
      if (done_) return;
      done_ = true;
      error_ = error;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::string error_;
};

using Numbers = std::vector<int64_t>;  // no lock anywhere: the workers have to order who touches them

struct FakeFlight {
  explicit FakeFlight(int64_t n) : number(n), grads{n, 2 * n} {}
  int64_t number;
  Numbers grads;  // written by the thread that launches
  std::shared_ptr<Numbers> received;
  std::shared_ptr<FakePending> pending;
  std::string describe() const { return "flight " + std::to_string(number); }
};

// The other ranks: a thread that answers each message with ten times its numbers, some time later.
class FakeExchange {
 public:
  explicit FakeExchange(unsigned seed) : random_(seed), wire_([this] { serve(); }) {}
  ~FakeExchange() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    wire_.join();
  }

  std::shared_ptr<FakePending> scatter(const Numbers& flat, const std::shared_ptr<Numbers>& received) {
    auto pending = std::make_shared<FakePending>();
    std::this_thread::sleep_for(takes);
    {
      const std::lock_guard lock(mutex_);
      messages_.push_back({flat, received, pending});
    }
    changed_.notify_all();
    return pending;
  }

  std::chrono::milliseconds takes{0};    // scatter()
  std::optional<int64_t> fails_from{};   // messages (from 0) that fail instead of arriving
  std::optional<int64_t> stalls_from{};  // that never arrive

 private:
  struct Message {
    Numbers flat;
    std::shared_ptr<Numbers> received;
    std::shared_ptr<FakePending> pending;
  };

  void serve() {
    for (int64_t count = 0;; ++count) {
      Message message;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !messages_.empty() || stopping_; });
        if (messages_.empty()) return;
        message = std::move(messages_.front());
        messages_.pop_front();
      }
      if (stalls_from && count >= *stalls_from) continue;
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 300));
      if (fails_from && count >= *fails_from) {
        std::this_thread::sleep_for(5ms);  // the next flight is on its way by then
        message.pending->finish("message " + std::to_string(count) + " is lost");
        continue;
      }
#if defined(ZX_INJECT_DEFECT)
      // Said to have arrived before it has, and not again: that would order the numbers before a reader who is late.
      message.pending->finish();
      for (const int64_t number : message.flat) message.received->push_back(10 * number);
#else
      for (const int64_t number : message.flat) message.received->push_back(10 * number);
      message.pending->finish();
#endif
    }
  }

  std::mt19937 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> messages_;
  bool stopping_ = false;
  std::thread wire_;  // last: it uses the others
};

struct Seen {
  std::vector<Numbers> reduced;  // written on the reduce worker
  Numbers packed;                // written on the pack worker
  std::atomic<int> with_buffers{0};
  std::atomic<int> most_with_buffers{0};
};

// What Flights does with tensors, with numbers.
class Rig {
 public:
  explicit Rig(bool has_threads = true, unsigned seed = 0)
      : exchange(seed),
        workers(
            has_threads, [this](FakeFlight& flight) { pack(flight); }, [this](FakeFlight& flight) { reduce(flight); }) {
  }

  void launch(int64_t number, bool small = false) { workers.launch(std::make_shared<FakeFlight>(number), small); }

  FakeExchange exchange;
  std::shared_ptr<Seen> seen = std::make_shared<Seen>();  // to be looked at when the rig is gone, too
  std::optional<int64_t> pack_throws{};
  zx::TwoWorkers<FakeFlight> workers;  // destroyed first: its threads use the others

 private:
  void pack(FakeFlight& flight) {
    seen->most_with_buffers = std::max(seen->most_with_buffers.load(), ++seen->with_buffers);
    workers.attempt(flight, [&] {
      if (workers.failed()) return;
      if (pack_throws == flight.number) throw std::runtime_error("no memory");
      seen->packed.push_back(flight.number);
      flight.received = std::make_shared<Numbers>();
      workers.set_pending(flight, exchange.scatter(flight.grads, flight.received));
      flight.grads.clear();
    });
  }

  void reduce(FakeFlight& flight) {
    workers.attempt(flight, [&] {
      if (flight.pending) flight.pending->wait();
      if (!workers.failed()) seen->reduced.push_back(*flight.received);
    });
    --seen->with_buffers;
  }
};

}  // namespace two_workers
