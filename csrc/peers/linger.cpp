#include "peers/linger.h"

#include <pthread.h>
#include <unistd.h>

#include <exception>
#include <mutex>
#include <thread>

#include "locks.h"
#include "peers/pause.h"
#include "peers/readers_in_memory.h"

namespace zx {
namespace {

constexpr std::chrono::milliseconds kLook{10};

struct Kept {
  std::shared_ptr<const Linger> linger;
  std::shared_ptr<const void> what;
};

struct BeforeEnd {
  std::weak_ptr<const void> owner;
  std::function<void()> tell;
};

struct Lists {
  pid_t process = getpid();
  Mutex<LockRank::lingering> mutex;  // of all below
  std::vector<std::weak_ptr<Linger>> made;
  std::vector<BeforeEnd> before_end;
  std::vector<Kept> kept;
  bool has_thread = false;
  bool is_freeing = false;
  bool is_over = false;  // nothing is freed any more
};

// Leaked, as its thread may outlive everything. A forked child has no such thread, and one of its own if it trains.
Lists& lists() {
  static std::atomic<Lists*> one = new Lists;
  Lists* found = one;
  if (found->process != getpid()) one = found = new Lists;
  return *found;
}

// What is kept, until there is nothing. It is freed without the lock.
void watch_kept() {
#ifdef __linux__
  pthread_setname_np(pthread_self(), "zerox linger");
#endif
  while (true) {
    std::this_thread::sleep_for(kLook);
    std::vector<Kept> over;
    {
      const std::lock_guard lock(lists().mutex);
      auto& kept = lists().kept;
      if (lists().is_over) return;
      for (Kept& each : kept) {
        if (each.linger->readers().empty()) over.push_back(std::exchange(each, {}));
      }
      std::erase_if(kept, [](const Kept& each) { return each.linger == nullptr; });
      lists().is_freeing = !over.empty();
      lists().has_thread = !kept.empty() || !over.empty();
      if (!lists().has_thread) return;
    }
    over.clear();
    const std::lock_guard lock(lists().mutex);
    lists().is_freeing = false;
  }
}

}  // namespace

Linger::Linger(const std::shared_ptr<FailureDetector>& failure_detector, std::vector<int64_t> processes, int rank)
    : failure_detector_(failure_detector),
      processes_(std::move(processes)),
      rank_(rank),
      timeout_(failure_detector->timeout()),
      own_(std::make_shared<ControlBlock>(ReadersInMemory::num_words)) {
  failure_detector->add_control_block(own_);
}

void Linger::list(const std::shared_ptr<Linger>& made) {
  const std::lock_guard lock(lists().mutex);
  std::erase_if(lists().made, [](const auto& each) { return each.expired(); });
  lists().made.push_back(made);
}

std::vector<std::shared_ptr<Linger>> Linger::all() {
  std::vector<std::shared_ptr<Linger>> living;
  const std::lock_guard lock(lists().mutex);
  for (const auto& each : lists().made) {
    if (auto one = each.lock()) living.push_back(std::move(one));
  }
  return living;
}

void Linger::keep(std::shared_ptr<const Linger> linger, std::shared_ptr<const void> what) {
  try {
    if (linger->readers().empty()) return;
    const std::lock_guard lock(lists().mutex);
    lists().kept.push_back({std::move(linger), std::move(what)});
    if (!lists().has_thread) std::thread(watch_kept).detach();
    lists().has_thread = true;
  } catch (const std::exception&) {  // there is no memory for a thread: the next one looks
  }
}

// The thread would need the GIL to free what Python knows, and it gets none while the interpreter ends.
void Linger::free_no_more() {
  check_may_wait("what is freed");
  Pause pause;
  while (true) {
    {
      const std::lock_guard lock(lists().mutex);
      lists().is_over = true;
      if (!lists().is_freeing) return;
    }
    pause();
  }
}

void Linger::before_end(std::weak_ptr<const void> owner, std::function<void()> tell) {
  const std::lock_guard lock(lists().mutex);
  std::erase_if(lists().before_end, [](const auto& each) { return each.owner.expired(); });
  lists().before_end.push_back({std::move(owner), std::move(tell)});
}

void Linger::come_no_more() {
  std::vector<BeforeEnd> told;  // without the lock
  {
    const std::lock_guard lock(lists().mutex);
    told = lists().before_end;
  }
  for (const BeforeEnd& each : told) {
    if (const auto owner = each.owner.lock()) each.tell();
  }
}

std::vector<int> Linger::readers() const {
  std::vector<int> found;
  for (int rank = 0; rank < static_cast<int>(processes_.size()); ++rank) {
    if (rank != rank_ && others_->may_read(rank)) found.push_back(rank);
  }
  return found;
}

void Linger::end_waits() const {
  if (const auto failure_detector = failure_detector_.lock()) failure_detector->end();
}

}  // namespace zx
