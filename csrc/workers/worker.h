// A thread that runs tasks in the order in which they were posted: the CPU's answer to a CUDA stream.
#pragma once

#include <pthread.h>

#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "locks.h"

namespace zx {

// Tasks must not throw. The thread starts with the first task, so that a process that only constructs an optimizer has
// none. A Worker must not be destroyed in a forked child, which lacks the thread.
class Worker {
 public:
  // `name`, of at most 15 characters, is what debuggers, profilers and `top -H` show.
  explicit Worker(const char* name = "worker") : name_(name) {}
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Finishes what was posted.
  ~Worker() {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    check_may_wait("the end of a worker");
    thread_.join();
  }

  void post(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  // Returns when everything posted before has run.
  void drain() {
    check_may_wait("a worker");
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty() && !busy_; });
  }

 private:
  void run() {
#ifdef __linux__
    pthread_setname_np(pthread_self(), name_);
#endif
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !tasks_.empty() || stopping_; });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      task();
      task = nullptr;  // frees what the task holds before anything hears that it is done
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  const char* name_;
  Mutex<LockRank::worker> mutex_;
  Condition changed_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

// Lets at most `count` holders pass at a time.
class Permits {
 public:
  explicit Permits(int count) : free_(count) {}

  void acquire() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return free_ > 0; });
    --free_;
  }

  void release() {
    {
      const std::lock_guard lock(mutex_);
      ++free_;
    }
    changed_.notify_one();
  }

 private:
  Mutex<LockRank::permits> mutex_;
  Condition changed_;
  int free_;
};

}  // namespace zx
