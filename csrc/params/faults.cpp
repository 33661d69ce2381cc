#include "params/faults.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>
#include <thread>
#include <utility>

#ifdef __linux__
#include <ucontext.h>
#endif

namespace zx {

#ifdef __linux__
namespace {

constexpr int kMostReaders = 256;
std::atomic<FaultReader*> readers[kMostReaders];
std::atomic<int> num_readers{0};  // slots that were ever used
std::atomic<int> num_inside{0};   // threads in the handler
struct sigaction before_ours;

// Its two kinds of handlers are one field.
bool is_function(const struct sigaction& action) {
  return action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN;
}

void pass_on(int signal, siginfo_t* info, void* context) {
  if (!is_function(before_ours)) {
    ::signal(signal, SIG_DFL);  // the instruction runs again, and ends the process
  } else if ((before_ours.sa_flags & SA_SIGINFO) != 0) {
    before_ours.sa_sigaction(signal, info, context);
  } else {
    before_ours.sa_handler(signal);
  }
}

// Whether the faulting instruction writes.
bool is_write(const void* context, const void* address) {
#if defined(__x86_64__)
  (void)address;
  constexpr greg_t kWrite = 2;
  return (static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & kWrite) != 0;
#else
  // If it comes here twice in a row, making the address readable was not enough.
  (void)context;
  static thread_local const void* last = nullptr;
  return std::exchange(last, address) == address;
#endif
}

void handle(int signal, siginfo_t* info, void* context) {
  const int saved = errno;
  bool done = false;
  if (info->si_code == SEGV_ACCERR) {
    const bool writes = is_write(context, info->si_addr);
    ++num_inside;
    for (int i = 0; i < num_readers && !done; ++i) {
      FaultReader* reader = readers[i];
      done = reader != nullptr && reader->access_at(info->si_addr, writes);
    }
    --num_inside;
  }
  errno = saved;
  if (!done) pass_on(signal, info, context);
}

void install() {
  struct sigaction ours{};
  ours.sa_sigaction = &handle;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, &before_ours);
}

}  // namespace

void keep_fault_handler() {
  static std::mutex mutex;
  static bool was_installed = false;
  const std::lock_guard lock(mutex);  // or two threads would install it, and the second find ours as the one before
  struct sigaction now{};
  sigaction(SIGSEGV, nullptr, &now);
  if (was_installed && is_function(now)) return;
  was_installed = true;
  install();
}

void add_fault_reader(FaultReader* reader) {
  keep_fault_handler();
  for (int i = 0; i < kMostReaders; ++i) {
    FaultReader* nobody = nullptr;
    if (!readers[i].compare_exchange_strong(nobody, reader)) continue;
    int used = num_readers;
    while (used <= i && !num_readers.compare_exchange_weak(used, i + 1)) {
    }
    return;
  }
  TORCH_CHECK(false, "zerox: ", kMostReaders, " optimizers with sharded parameters are alive: delete some");
}

void remove_fault_reader(FaultReader* reader) {
  for (auto& each : readers) {
    FaultReader* expected = reader;
    each.compare_exchange_strong(expected, nullptr);
  }
  while (num_inside > 0) std::this_thread::yield();
}

#else

void keep_fault_handler() {}
void add_fault_reader(FaultReader* /*reader*/) {}
void remove_fault_reader(FaultReader* /*reader*/) {}

#endif

}  // namespace zx
