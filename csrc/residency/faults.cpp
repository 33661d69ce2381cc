#include "residency/faults.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#ifdef __linux__
#include <pthread.h>
#include <ucontext.h>
#endif

#include "locks.h"

namespace zx {

#ifdef __linux__
namespace {

// ---- the readers

struct Place {
  std::atomic<FaultReader*> reader = nullptr;
  std::atomic<int> num_inside = 0;  // threads that have it look at a fault
};
constexpr int kMostReaders = 256;
Place places[kMostReaders];
std::atomic<int> num_places{0};  // that were ever used
std::atomic<int> num_readers{0};

// Of all that is installed, and of who is a reader. Never destroyed, and free in a forked child.
Mutex<LockRank::faults>& fault_mutex() {
  static auto* const one = [] {
    pthread_atfork([] { lock_at_fork(fault_mutex()); }, [] { fault_mutex().unlock(); }, [] { fault_mutex().unlock(); });
    return new Mutex<LockRank::faults>;
  }();
  return *one;
}

Place* place_of(const FaultReader* reader) {
  Place* const found =
      std::find_if(std::begin(places), std::end(places), [&](const Place& each) { return each.reader == reader; });
  return found == std::end(places) ? nullptr : found;
}

// ---- the handlers

// The threads that are inside of something, for handlers. A thread-local variable would have to be allocated where a
// thread uses it first, which may be here; one that needs no allocating can't be had by a library that is loaded late.
class ThreadsInside {
 public:
  bool has_this() const {
    const pthread_t self = pthread_self();
    return num_ > 0 &&
           std::any_of(std::begin(places_), std::end(places_), [self](const auto& at) { return at == self; });
  }
  void enter() {
    ++num_;
    while (!exchange_one(kNobody, pthread_self())) std::this_thread::yield();
  }
  void leave() {
    exchange_one(pthread_self(), kNobody);
    --num_;
  }

 private:
  static constexpr pthread_t kNobody = 0;
  static constexpr int kMost = 64;  // at a time: others wait

  bool exchange_one(pthread_t from, pthread_t to) {
    return std::any_of(std::begin(places_), std::end(places_), [from, to](auto& at) {
      pthread_t found = from;
      return at.compare_exchange_strong(found, to);
    });
  }

  std::atomic<int> num_{0};
  std::atomic<pthread_t> places_[kMost] = {};
};
ThreadsInside inside_reader;
ThreadsInside passes_on[2];  // by our first function, and by our second

// What was there before each of our functions.
struct Before {
  struct sigaction action;
  std::atomic<bool> is_spent = false;  // it was to be called once
  bool is_used = false;                // ours is installed, and may be what others call. Under the mutex
};
Before before[2];

// Its two kinds of handlers are one field.
bool is_function(const struct sigaction& action) {
  return action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN;
}

// Calls it as the kernel would.
void call(const struct sigaction& theirs, int signal, siginfo_t* info, void* context) {
  sigset_t blocked = theirs.sa_mask;
  if ((theirs.sa_flags & SA_NODEFER) == 0) sigaddset(&blocked, signal);
  sigset_t old;
  pthread_sigmask(SIG_BLOCK, &blocked, &old);
  if ((theirs.sa_flags & SA_SIGINFO) != 0) {
    theirs.sa_sigaction(signal, info, context);
  } else {
    theirs.sa_handler(signal);
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

void pass_on(int which, int signal, siginfo_t* info, void* context) {
  Before& theirs = before[which];
  const bool was_sent = info->si_code <= 0;  // by kill(2) or raise(3), and no instruction runs again
  if (was_sent && theirs.action.sa_handler == SIG_IGN) return;
  if (passes_on[which].has_this() || theirs.is_spent || !is_function(theirs.action)) {
    ::signal(signal, SIG_DFL);  // the instruction runs again, and ends the process
    if (was_sent) raise(signal);
    return;
  }
  theirs.is_spent = (theirs.action.sa_flags & SA_RESETHAND) != 0;
  passes_on[which].enter();
  call(theirs.action, signal, info, context);
  passes_on[which].leave();
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

// Whether it was a reader's address, and the instruction may run again.
bool was_let_through(const siginfo_t* info, const void* context) {
  if (info->si_code != SEGV_ACCERR || inside_reader.has_this()) return false;
  const int saved = errno;
  inside_reader.enter();
  const bool writes = is_write(context, info->si_addr);
  bool done = false;
  for (int i = 0; i < num_places && !done; ++i) {
    if (places[i].reader == nullptr) continue;
    ++places[i].num_inside;
    FaultReader* const reader = places[i].reader;  // again, now that it can't be removed
    done = reader != nullptr && reader->access_at(info->si_addr, writes);
    --places[i].num_inside;
  }
  inside_reader.leave();
  errno = saved;
  return done;
}

template <int kWhich>
void handle(int signal, siginfo_t* info, void* context) {
  if (!was_let_through(info, context)) pass_on(kWhich, signal, info, context);
}

// ---- which are installed: all under the mutex

using Handler = void (*)(int, siginfo_t*, void*);
constexpr Handler kOurs[] = {&handle<0>, &handle<1>};

// Which of ours it is, or -1.
int which_of_ours(const struct sigaction& action) {
  if ((action.sa_flags & SA_SIGINFO) == 0) return -1;
  const auto* const found = std::find(std::begin(kOurs), std::end(kOurs), action.sa_sigaction);
  return found == std::end(kOurs) ? -1 : static_cast<int>(found - std::begin(kOurs));
}

void put_on_top() {
  struct sigaction now{};
  sigaction(SIGSEGV, nullptr, &now);
  const int which = which_of_ours(now);
  if (which == 0) before[1].is_used = false;  // the handler between the two was taken away, and the second with it
  if (which >= 0) return;
  if (!is_function(now)) before[0].is_used = before[1].is_used = false;  // and so were all
  if (before[1].is_used) return;
  const int next = before[0].is_used ? 1 : 0;
  before[next].action = now;
  before[next].is_spent = false;
  before[next].is_used = true;
  struct sigaction ours{};
  ours.sa_sigaction = kOurs[next];
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, nullptr);
}

void take_away() {
  struct sigaction now{};
  sigaction(SIGSEGV, nullptr, &now);
  const int which = which_of_ours(now);
  if (which < 0) return;
  sigaction(SIGSEGV, &before[which].action, &now);
  if (which_of_ours(now) == which) {
    before[which].is_used = false;
  } else {
    sigaction(SIGSEGV, &now, nullptr);  // it was installed in between
  }
}

}  // namespace

void keep_fault_handler() {
  if (num_readers == 0 || inside_reader.has_this()) return;
  const std::lock_guard lock(fault_mutex());
  if (num_readers > 0) put_on_top();
}

void add_fault_reader(FaultReader* reader) {
  const std::lock_guard lock(fault_mutex());
  if (place_of(reader) == nullptr) {
    Place* const free = place_of(nullptr);
    if (free == nullptr) {
      throw std::runtime_error("zerox: " + std::to_string(kMostReaders) +
                               " models with sharded parameters are alive: delete some");
    }
    free->reader = reader;
    num_places = std::max<int>(num_places, static_cast<int>(free - places) + 1);
    ++num_readers;
  }
  put_on_top();
}

void remove_fault_reader(FaultReader* reader) {
  Place* place = nullptr;
  {
    const std::lock_guard lock(fault_mutex());
    place = place_of(reader);
    if (place == nullptr) return;
    place->reader = nullptr;
    if (--num_readers == 0) take_away();
  }
  check_may_wait("readers");
  while (place->num_inside > 0) std::this_thread::yield();
}

#else

void keep_fault_handler() {}
void add_fault_reader(FaultReader* /*reader*/) {}
void remove_fault_reader(FaultReader* /*reader*/) {}

#endif

}  // namespace zx
