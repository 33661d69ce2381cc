// The mutexes of csrc, and the order in which a thread takes them. Note [Locks] (buckets/buckets.h) says what each one
// guards, and why some may be waited under.
//
// A build with ZX_CHECK_LOCKS holds threads to it: one that takes a mutex out of order, or waits where it must not,
// ends the process with the names. Sanitizers and the C++ tests of threads have such builds. In others a Mutex is a
// std::mutex, and the checks are nothing.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <mutex>

#ifdef ZX_CHECK_LOCKS
#include <cstdio>
#include <cstdlib>
#endif

namespace zx {

// In the order in which they are taken.
enum class LockRank : uint8_t {
  synchronizer,
  before_next,
  buckets,
  gathers,
  gather,
  two_level_gathers,
  gone_residents,
  lingering,
  residencies,
  bucket_copies,
  airborne,
  device_room,
  spare_pages,
  storages,
  faults,
  shard_server,
  state_questions,
  state_server,
  peer_states,
  readers_by_message,
  both_pending,
  streams,
  worker,
  permits,
  first_messages,
  flight_log,
  gone_control_blocks,
  own_hooks,
  failure_detector,
  long_waits,
  question_server,
  questions,
  last_seen,
  guards,
  addresses,
  sums,
  published_state,
  state_tensors,
  late_leases,
};

// Whether a thread may wait for a device, a message, another rank or another thread under a mutex.
enum class MayWait : uint8_t {
  no,
  yes,
  in_the_end,  // also if it holds others that may not be waited under: nothing goes on in this process any more
};

struct LockKind {
  LockRank rank;
  int line;  // of Note [Locks]: a thread holds at most one of a line
  const char* name;
  MayWait may_wait = MayWait::no;
};

constexpr LockKind kLocks[] = {
    {LockRank::synchronizer, 0, "Synchronizer::mutex_", MayWait::yes},
    {LockRank::before_next, 1, "BeforeNext::mutex_"},
    {LockRank::buckets, 2, "Buckets::mutex"},
    {LockRank::gathers, 3, "Gathers::mutex_"},
    {LockRank::gather, 3, "Gather::mutex_", MayWait::yes},
    {LockRank::two_level_gathers, 4, "TwoLevelExchange's mutex", MayWait::yes},
    {LockRank::gone_residents, 4, "Residents::keep_for_others()'s own"},
    {LockRank::lingering, 4, "linger.cpp's lists()"},
    {LockRank::residencies, 4, "residency.cpp's all()"},
    {LockRank::bucket_copies, 5, "BucketCopies::mutex"},
    {LockRank::airborne, 5, "Airborne::mutex_"},
    {LockRank::device_room, 6, "DeviceRoom::mutex_"},
    {LockRank::spare_pages, 6, "SparePages::mutex_"},
    {LockRank::storages, 6, "AskedStorages::mutex_"},
    {LockRank::faults, 6, "fault_mutex()"},
    {LockRank::shard_server, 6, "ShardServer::mutex_"},
    {LockRank::state_questions, 6, "StateQuestions::mutex_"},
    {LockRank::state_server, 6, "StateServer::mutex_"},
    {LockRank::peer_states, 6, "PeerStates::mutex_"},
    {LockRank::readers_by_message, 6, "ReadersByMessage::mutex_"},
    {LockRank::both_pending, 6, "BothPending::mutex_"},
    {LockRank::streams, 6, "Streams::mutex_"},
    {LockRank::worker, 6, "Worker::mutex_"},
    {LockRank::permits, 6, "Permits::mutex_"},
    {LockRank::first_messages, 6, "FlightLog::first_messages_", MayWait::yes},
    {LockRank::flight_log, 6, "FlightLog::mutex_"},
    {LockRank::gone_control_blocks, 6, "ControlBlock::keep_for_others()'s own"},
    {LockRank::own_hooks, 6, "other_reducers.cpp's"},
    {LockRank::failure_detector, 7, "FailureDetector::mutex_", MayWait::in_the_end},
    {LockRank::long_waits, 7, "LongWaits::mutex_"},
    {LockRank::question_server, 7, "QuestionServer::mutex_"},
    {LockRank::questions, 7, "Questions::mutex_"},
    {LockRank::last_seen, 8, "LastSeen::mutex_"},
    {LockRank::guards, 9, "Guards::mutex"},
    {LockRank::addresses, 10, "addresses()"},
    {LockRank::sums, 10, "total_mutex of a kernel"},
    {LockRank::published_state, 10, "PublishedState::mutex_"},
    {LockRank::state_tensors, 11, "StateTensors::mutex_"},
    {LockRank::late_leases, 11, "lease.cpp's late()"},
};

constexpr bool locks_are_in_order() {
  for (size_t i = 0; i < std::size(kLocks); ++i) {
    if (static_cast<size_t>(kLocks[i].rank) != i || (i > 0 && kLocks[i].line < kLocks[i - 1].line)) return false;
  }
  return std::size(kLocks) == static_cast<size_t>(LockRank::late_leases) + 1;
}
static_assert(locks_are_in_order());

#ifndef ZX_CHECK_LOCKS

template <LockRank>
using Mutex = std::mutex;
using Condition = std::condition_variable;

// To be called before a thread waits for `what`: a device, a message, another rank or another thread.
inline void check_may_wait(const char* /*what*/) {}

// For functions of pthread_atfork(), which are called in the order of their registration, whatever the thread holds.
template <class Any>
void lock_at_fork(Any& mutex) {
  mutex.lock();
}

#else

// What a thread holds, in the order in which it has taken it.
class HeldLocks {
 public:
  static HeldLocks& here() {
    static constinit thread_local HeldLocks held;
    return held;
  }

  void check_next(LockRank next) const {
    for (int i = 0; i < count_; ++i) {
      if (kind(held_[i]).line < kind(next).line) continue;
      end(kind(next).name, "is taken while this thread holds", held_[i]);
    }
  }

  // `let_go`: what is let go of meanwhile.
  void check_may_wait(const char* what, const LockRank* let_go = nullptr) const {
    for (int i = count_ - 1; i >= 0; --i) {
      if (let_go != nullptr && held_[i] == *let_go) continue;
      if (kind(held_[i]).may_wait == MayWait::in_the_end) return;
      if (kind(held_[i]).may_wait == MayWait::no) end(what, "is waited for while this thread holds", held_[i]);
    }
  }

  void add(LockRank taken) {
    if (count_ == kMost) end(kind(taken).name, "is one too many, after", held_[count_ - 1]);
    held_[count_++] = taken;
  }

  void remove(LockRank let_go) {
    int place = count_ - 1;
    while (place >= 0 && held_[place] != let_go) --place;
    if (place < 0) end(kind(let_go).name, "is let go of by a thread that does not hold", let_go);
    for (--count_; place < count_; ++place) held_[place] = held_[place + 1];
  }

 private:
  static constexpr int kMost = 16;

  static const LockKind& kind(LockRank rank) { return kLocks[static_cast<size_t>(rank)]; }

  [[noreturn]] static void end(const char* what, const char* is_wrong, LockRank held) {
    std::fprintf(stderr, "zerox: %s %s %s: see Note [Locks] in csrc/buckets/buckets.h\n", what, is_wrong,
                 kind(held).name);
    std::abort();
  }

  LockRank held_[kMost] = {};
  int count_ = 0;
};

inline void check_may_wait(const char* what) { HeldLocks::here().check_may_wait(what); }

template <LockRank kOwnRank>
class Mutex {
 public:
  static constexpr LockRank kRank = kOwnRank;

  void lock() {
    HeldLocks::here().check_next(kRank);
    lock_at_fork();
  }
  void lock_at_fork() {
    mutex_.lock();
    HeldLocks::here().add(kRank);
  }
  bool try_lock() {
    HeldLocks::here().check_next(kRank);
    if (!mutex_.try_lock()) return false;
    HeldLocks::here().add(kRank);
    return true;
  }
  void unlock() {
    HeldLocks::here().remove(kRank);
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
};

template <class Any>
void lock_at_fork(Any& mutex) {
  mutex.lock_at_fork();
}

// A thread that waits for it holds one mutex, which is let go of meanwhile, and others only if they may be waited
// under.
class Condition {
 public:
  template <class Held, class IsOver>
  void wait(Held& held, const IsOver& is_over) {
    if (is_over()) return;
    HeldLocks::here().check_may_wait("another thread", &Held::mutex_type::kRank);
    changed_.wait(held, is_over);
  }
  template <class Held, class Patience, class IsOver>
  bool wait_for(Held& held, const Patience& patience, const IsOver& is_over) {
    if (is_over()) return true;
    HeldLocks::here().check_may_wait("another thread", &Held::mutex_type::kRank);
    return changed_.wait_for(held, patience, is_over);
  }
  void notify_one() { changed_.notify_one(); }
  void notify_all() { changed_.notify_all(); }

 private:
  std::condition_variable_any changed_;
};

#endif

}  // namespace zx
