#include "workers/process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <string>

namespace zx {
namespace {

// Forks are counted, since getpid() is a system call, and hooks could not afford one for each gradient.
std::atomic<int64_t> num_forks{0};
[[maybe_unused]] const int counted = pthread_atfork(nullptr, nullptr, [] { ++num_forks; });

}  // namespace

Process::Process() : num_forks_(num_forks) {}

bool Process::is_this() const { return num_forks_ == num_forks.load(std::memory_order_relaxed); }

void Process::check() const {
  if (is_this()) return;
  throw std::runtime_error(
      "zerox: process " + std::to_string(getpid()) +
      " was forked from the one that built this optimizer: it may read parameters and state_dict(), but has neither "
      "the threads nor the connections to train with. Train in the process that built it; a child can train "
      "copy.deepcopy(model) with an optimizer of its own (process_group=\"alone\")");
}

}  // namespace zx
