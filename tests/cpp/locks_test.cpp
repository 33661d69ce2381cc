// Threads that break Note [Locks] end with the names, and others don't. Each dies in a process of its own.
#include "locks.h"

#include <chrono>
#include <csignal>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "check.h"
#include "child.h"
#include "workers/two_workers.h"

namespace {

using zx::LockRank;

// What `body` writes to stderr before it aborts; "lived" if it does not abort.
template <class Body>
std::string last_words_of(const Body& body) {
  const auto ended = zx::testing::end_of([&body] {
    std::signal(SIGABRT, SIG_DFL);  // a sanitizer's handler would report it
    body();
  });
  return WIFSIGNALED(ended.status) && WTERMSIG(ended.status) == SIGABRT ? ended.said : "lived";
}

bool says(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

zx::Mutex<LockRank::synchronizer> synchronizer;
zx::Mutex<LockRank::buckets> buckets;
zx::Mutex<LockRank::bucket_copies> bucket_copies;
zx::Mutex<LockRank::device_room> device_room;
zx::Mutex<LockRank::flight_log> flight_log;
zx::Mutex<LockRank::failure_detector> failure_detector;
zx::Mutex<LockRank::faults> faults;
zx::Mutex<LockRank::guards> guards;

}  // namespace

TEST(the_notes_order_is_allowed_and_so_is_any_order_of_letting_go) {
  CHECK_EQ(last_words_of([] {
             synchronizer.lock();
             buckets.lock();
             bucket_copies.lock();
             buckets.unlock();
             device_room.lock();
             synchronizer.unlock();
             bucket_copies.unlock();
             device_room.unlock();
             const std::lock_guard again(synchronizer);
             const bool taken = buckets.try_lock();
             if (!taken) std::abort();
           }),
           "lived");
}

TEST(a_wrong_order_ends_with_both_names) {
  const std::string said = last_words_of([] {
    const std::lock_guard inner(device_room);
    const std::lock_guard outer(bucket_copies);
  });
  CHECK_EQ(said,
           "zerox: BucketCopies::mutex is taken while this thread holds DeviceRoom::mutex_: see Note [Locks] in "
           "csrc/buckets/buckets.h\n");
  CHECK_EQ(last_words_of([] {
             const std::lock_guard inner(device_room);
             (void)bucket_copies.try_lock();
           }),
           said);
}

TEST(a_wrong_order_is_noticed_below_the_last_one_too) {
  const std::string said = last_words_of([] {
    const std::lock_guard first(buckets);
    const std::lock_guard second(device_room);
    buckets.unlock();
    buckets.lock();
  });
  CHECK(says(said, "Buckets::mutex is taken while this thread holds DeviceRoom::mutex_"));
}

TEST(two_of_a_line_are_not_held_together) {
  const std::string said = last_words_of([] {
    const std::lock_guard one(device_room);
    const std::lock_guard other(faults);
  });
  CHECK(says(said, "fault_mutex() is taken while this thread holds DeviceRoom::mutex_"));
  const std::string same = last_words_of([] {
    zx::Mutex<LockRank::device_room> another;
    const std::lock_guard one(device_room);
    const std::lock_guard other(another);
  });
  CHECK(says(same, "DeviceRoom::mutex_ is taken while this thread holds DeviceRoom::mutex_"));
}

TEST(each_thread_has_its_own) {
  CHECK_EQ(last_words_of([] {
             const std::lock_guard inner(device_room);
             std::thread([] { const std::lock_guard outer(bucket_copies); }).join();
           }),
           "lived");
}

TEST(what_is_not_held_is_not_let_go_of) {
  CHECK(says(last_words_of([] { buckets.unlock(); }), "Buckets::mutex is let go of by a thread that does not hold"));
}

TEST(a_wait_under_a_mutex_ends_with_both_names) {
  CHECK_EQ(last_words_of([] {
             const std::lock_guard lock(bucket_copies);
             zx::check_may_wait("a device");
           }),
           "zerox: a device is waited for while this thread holds BucketCopies::mutex: see Note [Locks] in "
           "csrc/buckets/buckets.h\n");
}

TEST(a_wait_without_one_is_allowed_and_so_is_one_under_those_of_the_note) {
  CHECK_EQ(last_words_of([] { zx::check_may_wait("a device"); }), "lived");
  CHECK_EQ(last_words_of([] {
             const std::lock_guard lock(synchronizer);
             zx::check_may_wait("a message");
           }),
           "lived");
  CHECK(says(last_words_of([] {
               const std::lock_guard outer(synchronizer);
               const std::lock_guard inner(buckets);
               zx::check_may_wait("a message");
             }),
             "a message is waited for while this thread holds Buckets::mutex"));
}

TEST(who_gives_up_may_wait_whatever_it_holds) {
  CHECK_EQ(last_words_of([] {
             const std::lock_guard outer(flight_log);
             const std::lock_guard inner(failure_detector);
             zx::check_may_wait("the store");
           }),
           "lived");
}

TEST(a_worker_is_not_waited_for_under_a_mutex) {
  const std::string said = last_words_of([] {
    zx::Worker worker;
    const std::lock_guard lock(buckets);
    worker.drain();
  });
  CHECK(says(said, "a worker is waited for while this thread holds Buckets::mutex"));
  const std::string at_the_end = last_words_of([] {
    auto worker = std::make_unique<zx::Worker>();
    worker->post([] {});
    const std::lock_guard lock(buckets);
    worker.reset();
  });
  CHECK(says(at_the_end, "the end of a worker is waited for while this thread holds Buckets::mutex"));
}

TEST(a_condition_lets_go_of_its_own_mutex_only) {
  zx::Condition changed;
  const auto wait = [&changed](bool is_over) {
    std::unique_lock lock(bucket_copies);
    (void)changed.wait_for(lock, std::chrono::milliseconds(1), [is_over] { return is_over; });
  };
  CHECK_EQ(last_words_of([&] { wait(false); }), "lived");
  CHECK_EQ(last_words_of([&] {
             const std::lock_guard outer(buckets);
             wait(true);  // for nothing
           }),
           "lived");
  CHECK(says(last_words_of([&] {
               const std::lock_guard outer(buckets);
               wait(false);
             }),
             "another thread is waited for while this thread holds Buckets::mutex"));
}

TEST(a_fork_takes_its_own_in_any_order) {
  CHECK_EQ(last_words_of([] {
             const std::lock_guard held(buckets);
             zx::lock_at_fork(guards);
             zx::lock_at_fork(faults);
             guards.unlock();
             faults.unlock();
             const std::lock_guard later(device_room);
           }),
           "lived");
}
