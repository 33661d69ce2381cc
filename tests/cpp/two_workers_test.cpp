// TwoWorkers with a fake exchange, whose messages arrive from another thread after random delays. The thread sanitizer
// runs this file too, once with a defect that it has to report: see CMakeLists.txt.
#include "check.h"
#include "two_workers_rig.h"

namespace {

using namespace two_workers;

std::vector<Numbers> tenfold(int64_t count) {
  std::vector<Numbers> all;
  for (int64_t i = 0; i < count; ++i) all.push_back({10 * i, 20 * i});
  return all;
}

void check_reduced(const std::vector<Numbers>& reduced, const std::vector<Numbers>& expected) {
  CHECK_EQ(reduced.size(), expected.size());
  for (size_t i = 0; i < std::min(reduced.size(), expected.size()); ++i) CHECK_EQ(reduced[i], expected[i]);
}

}  // namespace

TEST(flights_land_in_launch_order_with_what_was_sent) {
  for (const bool has_threads : {true, false}) {
    for (unsigned seed = 0; seed < 20; ++seed) {
      Rig rig(has_threads, seed);
      for (int64_t i = 0; i < 12; ++i) rig.launch(i);
      CHECK_EQ(rig.workers.num_launched(), int64_t{12});
      CHECK_EQ(rig.workers.drain(), std::string());
      CHECK_EQ(rig.workers.num_reduced(), int64_t{12});
      CHECK_EQ(rig.workers.trouble(), std::string());
      check_reduced(rig.seen->reduced, tenfold(12));
    }
  }
}

TEST(a_launcher_waits_until_few_have_not_reduced) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Rig rig(true, seed);
    for (int64_t i = 0; i < 12; ++i) {
      rig.launch(i);
      CHECK(rig.workers.await_all_but(1, {10s}) == zx::WaitEnd::few);
      CHECK(rig.workers.num_launched() - rig.workers.num_reduced() <= 1);
    }
    CHECK_EQ(rig.workers.drain(), std::string());
  }
}

TEST(a_launcher_does_not_wait_for_what_never_lands) {
  Rig stalled;
  stalled.exchange.stalls_from = 1;
  for (int64_t i = 0; i < 3; ++i) stalled.launch(i);
  const auto start = std::chrono::steady_clock::now();
  CHECK(stalled.workers.await_all_but(1, {50ms}) == zx::WaitEnd::too_long);
  int looks = 0;
  CHECK(stalled.workers.await_all_but(1, {.least = 5ms, .most = 60s, .ends = [&] { return ++looks == 3; }}) ==
        zx::WaitEnd::in_vain);
  CHECK_EQ(looks, 3);
  CHECK(std::chrono::steady_clock::now() - start < 5s);

  Rig failing;
  failing.exchange.fails_from = 0;
  for (int64_t i = 0; i < 3; ++i) failing.launch(i);
  CHECK(failing.workers.await_all_but(0, {10s}) == zx::WaitEnd::few);
}

// Hooks come from several autograd threads, under the manager's lock.
TEST(flights_may_be_launched_by_several_threads) {
  constexpr int64_t kThreads = 4;
  constexpr int64_t kEach = 50;
  Rig rig;
  std::mutex manager;
  int64_t next = 0;
  std::vector<std::thread> threads;
  for (int64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&] {
      for (int64_t i = 0; i < kEach; ++i) {
        const std::lock_guard lock(manager);
        rig.launch(next++);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(rig.workers.drain(), std::string());
  check_reduced(rig.seen->reduced, tenfold(kThreads * kEach));
}

TEST(launching_does_not_wait_for_the_wire_and_never_are_there_more_than_two_with_buffers) {
  Rig rig;
  rig.exchange.stalls_from = 0;
  for (int64_t i = 0; i < 6; ++i) rig.launch(i);  // returns
  while (rig.seen->with_buffers < 2) std::this_thread::yield();
  std::this_thread::sleep_for(20ms);
  CHECK_EQ(rig.seen->most_with_buffers.load(), 2);
  CHECK_EQ(rig.workers.num_reduced(), int64_t{0});
  CHECK_EQ(rig.workers.trouble(),
           std::string("still awaited: flight 0, flight 1, flight 2, flight 3, flight 4, flight 5"));
}

TEST(a_small_flight_is_flown_by_who_launches_it_unless_others_are_in_the_air) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Rig rig(true, seed);
    rig.launch(0, /*small=*/true);
    CHECK_EQ(rig.workers.num_reduced(), int64_t{1});
    for (int64_t i = 1; i < 9; ++i) rig.launch(i, i % 2 == 0);
    CHECK_EQ(rig.workers.drain(), std::string());
    check_reduced(rig.seen->reduced, tenfold(9));
  }
}

TEST(others_may_ask_for_trouble_while_flights_come_and_go) {
  Rig rig;
  std::atomic<bool> stop{false};
  std::thread curious([&] {
    while (!stop) {
      const std::string text = rig.workers.trouble();
      CHECK(text.empty() || text.rfind("still awaited: flight ", 0) == 0);
      CHECK(rig.workers.num_reduced() <= rig.workers.num_launched());
    }
  });
  for (int64_t round = 0; round < 20; ++round) {
    for (int64_t i = 0; i < 5; ++i) rig.launch(5 * round + i);
    rig.workers.drain();
  }
  stop = true;
  curious.join();
  check_reduced(rig.seen->reduced, tenfold(100));
}

TEST(held_flights_land_only_when_they_are_waited_for) {
  Rig rig;
  rig.workers.hold_back(true);
  for (int64_t i = 0; i < 4; ++i) rig.launch(i);
  std::this_thread::sleep_for(10ms);
  CHECK_EQ(rig.workers.num_reduced(), int64_t{0});
  CHECK_EQ(rig.workers.drain(), std::string());
  check_reduced(rig.seen->reduced, tenfold(4));
}

TEST(a_task_runs_after_the_flights_before_it_and_before_those_behind_it) {
  for (const bool hold : {false, true}) {
    Rig rig;
    rig.workers.hold_back(hold);
    std::vector<size_t> seen;
    for (int64_t i = 0; i < 3; ++i) rig.launch(i);
    rig.workers.after_reduction([&] { seen.push_back(rig.seen->reduced.size()); });
    rig.workers.after_reduction([&] { seen.push_back(rig.seen->reduced.size()); });
    rig.launch(3);
    rig.workers.drain();
    CHECK_EQ(seen, (std::vector<size_t>{3, 3}));
    check_reduced(rig.seen->reduced, tenfold(4));
  }
}

TEST(a_task_with_nothing_in_the_air_runs_at_once) {
  Rig rig;
  rig.launch(0);
  rig.workers.drain();
  std::thread::id where;
  rig.workers.after_reduction([&] { where = std::this_thread::get_id(); });
  CHECK(where == std::this_thread::get_id());
}

TEST(the_first_failure_is_told_and_stops_what_comes_behind) {
  Rig lost;
  lost.exchange.fails_from = 2;
  for (int64_t i = 0; i < 6; ++i) lost.launch(i);
  const std::string text = "zerox: the gradients of flight 2 did not arrive from all ranks: message 2 is lost";
  CHECK_EQ(lost.workers.drain(), text);
  check_reduced(lost.seen->reduced, tenfold(2));
  CHECK_EQ(lost.workers.num_reduced(), int64_t{6});
  lost.launch(6);
  CHECK_EQ(lost.workers.drain(), text);
  CHECK_EQ(lost.workers.trouble(), text);
  check_reduced(lost.seen->reduced, tenfold(2));

  Rig full;
  full.pack_throws = 1;
  for (int64_t i = 0; i < 4; ++i) full.launch(i);
  CHECK_EQ(full.workers.drain(),
           std::string("zerox: the gradients of flight 1 did not arrive from all ranks: no memory"));
  CHECK_EQ(full.seen->packed, Numbers{0});
}

TEST(destruction_aborts_what_is_under_way_and_waits_for_nobody) {
  for (unsigned seed = 0; seed < 30; ++seed) {
    auto rig = std::make_unique<Rig>(true, seed);
    const std::shared_ptr<Seen> seen = rig->seen;
    rig->exchange.stalls_from = seed % 4;
    for (int64_t i = 0; i < 5; ++i) rig->launch(i);
    if (seed % 3 > 0) std::this_thread::sleep_for(std::chrono::microseconds(100 * seed));
    rig.reset();  // returns
    CHECK_EQ(seen->with_buffers.load(), 0);
    CHECK(seen->reduced.size() <= seed % 4);
  }
}

TEST(destruction_aborts_what_is_sent_meanwhile) {
  auto rig = std::make_unique<Rig>();
  rig->exchange.stalls_from = 0;
  rig->exchange.takes = 30ms;
  const std::shared_ptr<Seen> seen = rig->seen;
  rig->launch(0);
  while (seen->with_buffers == 0) std::this_thread::yield();  // it is being packed, and has no messages yet
  rig.reset();                                                // returns
  CHECK_EQ(seen->reduced.size(), size_t{0});
}
