// Worker and Permits. The thread sanitizer runs this file too.
#include "workers/worker.h"

#include <atomic>
#include <chrono>
#include <future>
#include <memory>

#include "check.h"

namespace {

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

#if defined(__SANITIZE_THREAD__)
constexpr int kTasks = 1000;
#else
constexpr int kTasks = 20000;
#endif

}  // namespace

TEST(tasks_run_in_the_order_in_which_they_were_posted) {
  zx::Worker worker;
  std::vector<int> ran;  // no lock: one thread writes, and drain orders this thread behind it
  for (int i = 0; i < kTasks; ++i) worker.post([&ran, i] { ran.push_back(i); });
  worker.drain();
  CHECK_EQ(ran.size(), static_cast<size_t>(kTasks));
  for (int i = 0; i < static_cast<int>(ran.size()); ++i) CHECK_EQ(ran[static_cast<size_t>(i)], i);
}

TEST(each_of_several_posting_threads_keeps_its_order) {
  constexpr int kThreads = 4;
  zx::Worker worker;
  std::vector<std::vector<int>> ran(kThreads);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&worker, &ran, thread] {
      for (int i = 0; i < kTasks / kThreads; ++i) {
        worker.post([&ran, thread, i] { ran[static_cast<size_t>(thread)].push_back(i); });
        if (i % 100 == 0) worker.drain();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  worker.drain();
  for (const std::vector<int>& one : ran) {
    CHECK_EQ(one.size(), static_cast<size_t>(kTasks / kThreads));
    for (int i = 0; i < static_cast<int>(one.size()); ++i) CHECK_EQ(one[static_cast<size_t>(i)], i);
  }
}

TEST(drain_waits_for_the_task_that_is_running) {
  zx::Worker worker;
  std::atomic<bool> done{false};
  worker.post([&done] {
    pause_ms(30);
    done = true;
  });
  worker.drain();
  CHECK(done);
}

TEST(drain_of_a_worker_without_tasks_returns) {
  zx::Worker worker;
  worker.drain();
  worker.post([] {});
  worker.drain();
  worker.drain();
}

TEST(a_task_may_post_another_and_drain_waits_for_both) {
  zx::Worker worker;
  std::atomic<int> ran{0};
  worker.post([&] {
    worker.post([&ran] {
      pause_ms(10);
      ++ran;
    });
    ++ran;
  });
  worker.drain();
  CHECK_EQ(ran.load(), 2);
}

TEST(the_destructor_finishes_what_was_posted) {
  std::atomic<int> ran{0};
  {
    zx::Worker worker;
    for (int i = 0; i < 50; ++i) {
      worker.post([&ran, i] {
        if (i == 0) pause_ms(20);
        ++ran;
      });
    }
  }
  CHECK_EQ(ran.load(), 50);
}

TEST(what_a_task_holds_is_freed_before_drain_returns) {
  struct SlowToDie {
    std::atomic<bool>* dead;
    explicit SlowToDie(std::atomic<bool>* flag) : dead(flag) {}
    ~SlowToDie() {
      pause_ms(20);
      *dead = true;
    }
  };
  zx::Worker worker;
  std::atomic<bool> dead{false};
  auto held = std::make_shared<SlowToDie>(&dead);
  worker.post([held = std::move(held)] {});
  worker.drain();
  CHECK(dead);
}

// What dies may need a lock that somebody holds who is posting: the GIL, for one.
TEST(others_may_post_while_what_a_task_holds_is_freed) {
  struct Dies {
    zx::Worker* worker;
    std::thread* other;
    std::atomic<bool>* in_time;
    ~Dies() {
      auto posted = std::make_shared<std::promise<void>>();
      std::future<void> done = posted->get_future();
      *other = std::thread([worker = worker, posted] {
        worker->post([] {});
        posted->set_value();
      });
      *in_time = done.wait_for(std::chrono::seconds(2)) == std::future_status::ready;
    }
  };
  std::thread other;
  std::atomic<bool> in_time{false};
  zx::Worker worker;
  worker.post([held = std::shared_ptr<Dies>(new Dies{&worker, &other, &in_time})] {});
  worker.drain();
  CHECK(in_time);
  other.join();
}

TEST(no_more_holders_than_slots_and_all_get_their_turn) {
  constexpr int kSlots = 2;
  zx::Permits slots(kSlots);
  std::atomic<int> inside{0};
  std::atomic<int> most{0};
  std::atomic<int> turns{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 6; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        slots.acquire();
        const int now = ++inside;
        for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
        }
        if (i % 5 == 0) pause_ms(1);
        --inside;
        ++turns;
        slots.release();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(most.load(), kSlots);
  CHECK_EQ(turns.load(), 6 * 20);
}
