// What csrc/cuda/device.cuh needs where its kernels are compiled for the host: see Note [Kernels that run on the host].
//
// A block's threads are fibers on the CPU thread that launches. A barrier suspends a fiber until all it waits for have
// come, so code between two barriers runs for one thread after the other, in an order that a test chooses: what was
// only right because a barrier is missing in one order is wrong in another. Shared memory starts as garbage in every
// block.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

#include "cuda_access_on_host.h"
#include "fiber_switch.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define ZX_GRID_CONSTANT
#define ZX_UNROLL  // it would take half as long again to compile, for nothing that a test sees
#define ZX_UNROLL_TWICE
#define ZX_SHARED(type, name)                                            \
  static thread_local ::zx::cuda::on_host::Shared<type> name##_in_block; \
  type& name = name##_in_block.get()

using cudaError_t = int;
constexpr int cudaSuccess = 0;
constexpr int cudaErrorInvalidValue = 1;

namespace zx::cuda::on_host {

struct Index {
  unsigned x;
};
inline thread_local Index thread_index;
inline thread_local Index block_index;
inline thread_local Index block_dim;
inline thread_local Index grid_dim;

enum class Order { ascending, descending, shuffled };

// What a test chooses.
inline Order order = Order::ascending;
inline unsigned num_blocks = 3;      // on the whole device at a time
inline uint64_t num_barriers = 0;    // released so far: a proof that they are there
inline int approximation_error = 0;  // of approximate_reciprocal and approximate_rsqrt, in units of the last place

enum class Wait : uint8_t { nothing, warp, block, done };

class Block {
 public:
  static constexpr int kStackBytes = 1 << 16;

  ~Block() {
    for (const Fiber& fiber : fibers_) {
      if (fiber.stack != nullptr) munmap(fiber.stack, kStackBytes);
    }
  }
  static Block& instance() {
    static thread_local Block block;
    return block;
  }

  template <class Args>
  void run(void (*kernel)(Args), const Args& args) {
    ++generation_;
    body_ = [](const void* call) {
      const auto& [function, arguments] = *static_cast<const std::pair<void (*)(Args), const Args*>*>(call);
      function(*arguments);
    };
    const std::pair<void (*)(Args), const Args*> call{kernel, &args};
    call_ = &call;
    for (int i = 0; i < kThreads; ++i) prepare(i);
    while (resume_all()) {
    }
  }

  // Called by the fiber that runs.
  void wait(Wait what) {
    fibers_[current_].wait = what;
    leave();
  }
  uint64_t generation() const { return generation_; }
  // Waits for the warp and returns what each lane put in. In turn in one of two places: who is ahead by one exchange
  // does not overwrite what others still read, and nobody can be ahead by two.
  const std::array<uint64_t, kWarp>& exchange(uint64_t value) {
    const int thread = current_;
    auto& place = exchanged_[fibers_[thread].num_exchanges++ % 2][thread / kWarp];
    place[thread % kWarp] = value;
    wait(Wait::warp);
    return place;
  }
  int lane() const { return current_ % kWarp; }

 private:
  struct Fiber {
    Context context;
    void* stack = nullptr;
    void* shadow = nullptr;
    Wait wait = Wait::done;
    int num_exchanges = 0;
  };

  static void start() {
    Block& self = instance();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &self.scheduler_bottom_, &self.scheduler_size_);
#endif
    self.body_(self.call_);
    self.fibers_[self.current_].wait = Wait::done;
    self.leave(/*for_good=*/true);
  }

  void prepare(int i) {
    Fiber& fiber = fibers_[i];
    if (fiber.stack == nullptr) {
      fiber.stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (fiber.stack == MAP_FAILED) die("no memory for a fiber");
    }
    fiber.context.prepare(fiber.stack, kStackBytes, &start);
    fiber.wait = Wait::nothing;
    fiber.num_exchanges = 0;
  }

  // Runs fibers until all wait for the whole block, and opens that barrier. False when all are done.
  bool resume_all() {
    std::array<int, kWarps> warps;
    std::iota(warps.begin(), warps.end(), 0);
    if (order == Order::descending) std::reverse(warps.begin(), warps.end());
    if (order == Order::ascending) {  // all warps in step
      bool moved = true;
      while (moved) {
        moved = false;
        for (const int warp : warps) moved |= resume(warp);
      }
    } else {  // one warp runs ahead of all others as far as it can
      if (order == Order::shuffled) std::shuffle(warps.begin(), warps.end(), random_);
      for (const int warp : warps) {
        while (resume(warp)) {
        }
      }
    }
    if (release(Wait::block, fibers_.data(), kThreads)) return true;
    const bool all_done = std::all_of(fibers_.begin(), fibers_.end(), [](auto& f) { return f.wait == Wait::done; });
    if (!all_done) die("threads wait at different barriers for ever");
    return false;
  }

  // Every lane of a warp up to its next barrier. True if that was the warp's own, which is open then.
  bool resume(int warp) {
    Fiber* lanes = fibers_.data() + warp * kWarp;
    std::array<int, kWarp> turns;
    std::iota(turns.begin(), turns.end(), 0);
    if (order == Order::descending) std::reverse(turns.begin(), turns.end());
    if (order == Order::shuffled) std::shuffle(turns.begin(), turns.end(), random_);
    for (const int lane : turns) {
      if (lanes[lane].wait == Wait::nothing) enter(warp * kWarp + lane);
    }
    return release(Wait::warp, lanes, kWarp);
  }

  bool release(Wait what, Fiber* fibers, int count) {
    int num_waiting = 0;
    for (int i = 0; i < count; ++i) {
      if (fibers[i].wait == what) {
        ++num_waiting;
      } else if (fibers[i].wait != Wait::done) {
        return false;
      }
    }
    if (num_waiting == 0) return false;
    for (int i = 0; i < count; ++i) {
      if (fibers[i].wait == what) fibers[i].wait = Wait::nothing;
    }
    ++num_barriers;
    return true;
  }

  void enter(int i) {
    current_ = i;
    thread_index.x = static_cast<unsigned>(i);
#if defined(__SANITIZE_ADDRESS__)
    void* shadow = nullptr;
    __sanitizer_start_switch_fiber(&shadow, fibers_[i].stack, kStackBytes);
#endif
    Context::swap(scheduler_, fibers_[i].context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(shadow, nullptr, nullptr);
#endif
  }

  void leave(bool for_good = false) {
    Fiber& fiber = fibers_[current_];
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.shadow, scheduler_bottom_, scheduler_size_);
#endif
    static_cast<void>(for_good);
    Context::swap(fiber.context, scheduler_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fiber.shadow, &scheduler_bottom_, &scheduler_size_);
#endif
  }

  [[noreturn]] static void die(const char* why) {
    std::fprintf(stderr, "cuda_on_host: %s\n", why);
    std::abort();
  }

  std::array<Fiber, kThreads> fibers_;
  std::array<std::array<std::array<uint64_t, kWarp>, kWarps>, 2> exchanged_{};
  Context scheduler_;
  const void* scheduler_bottom_ = nullptr;
  size_t scheduler_size_ = 0;
  void (*body_)(const void*) = nullptr;
  const void* call_ = nullptr;
  int current_ = 0;
  uint64_t generation_ = 0;
  std::mt19937 random_{0};
};

// A variable that a block shares, garbage when the block starts.
template <class T>
class Shared {
 public:
  T& get() {
    const uint64_t generation = Block::instance().generation();
    if (generation_ != generation) std::memset(&value_, 0xcd, sizeof(value_));
    generation_ = generation;
    return value_;
  }

 private:
  alignas(16) T value_;
  uint64_t generation_ = 0;
};

}  // namespace zx::cuda::on_host

#define threadIdx ::zx::cuda::on_host::thread_index
#define blockIdx ::zx::cuda::on_host::block_index
#define blockDim ::zx::cuda::on_host::block_dim
#define gridDim ::zx::cuda::on_host::grid_dim

inline void __syncthreads() { zx::cuda::on_host::Block::instance().wait(zx::cuda::on_host::Wait::block); }
inline void __syncwarp() { zx::cuda::on_host::Block::instance().wait(zx::cuda::on_host::Wait::warp); }

template <class T>
T __shfl_down_sync(unsigned /*lanes*/, T value, int delta, int width) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  auto& block = zx::cuda::on_host::Block::instance();
  const int lane = block.lane();
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = block.exchange(bits)[lane % width + delta < width ? lane + delta : lane];
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
T __shfl_xor_sync(unsigned /*lanes*/, T value, int mask, int /*width*/) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  auto& block = zx::cuda::on_host::Block::instance();
  const int lane = block.lane();
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = block.exchange(bits)[lane ^ mask];
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline int __any_sync(unsigned /*lanes*/, int condition) {
  const auto& all = zx::cuda::on_host::Block::instance().exchange(condition != 0 ? 1 : 0);
  return std::any_of(all.begin(), all.end(), [](uint64_t x) { return x != 0; }) ? 1 : 0;
}

// No other fiber runs in between.
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
  const unsigned long long old = *to;
  *to = old + value;
  return old;
}
inline unsigned long long atomicMax(unsigned long long* to, unsigned long long value) {
  const unsigned long long old = *to;
  *to = std::max(old, value);
  return old;
}

namespace zx::cuda {

inline float approximately(double y) {
  const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(y));
  return std::bit_cast<float>(bits + static_cast<uint32_t>(on_host::approximation_error));
}
inline float approximate_reciprocal(float x) { return approximately(1.0 / static_cast<double>(x)); }
inline float approximate_rsqrt(float x) { return approximately(1.0 / std::sqrt(static_cast<double>(x))); }

template <class T>
const T* in_global(const T* pointer) {
  return pointer;
}

template <class Args>
cudaError_t launch(void (*kernel)(Args), int64_t num_tiles, Stream /*stream*/, const Args& args) {
  using namespace on_host;
  if (num_tiles <= 0) return cudaSuccess;
  grid_dim.x = static_cast<unsigned>(std::min<int64_t>(num_tiles, num_blocks));
  block_dim.x = kThreads;
  for (unsigned block = 0; block < grid_dim.x; ++block) {
    block_index.x = order == Order::descending ? grid_dim.x - 1 - block : block;
    Block::instance().run(kernel, args);
  }
  return cudaSuccess;
}

}  // namespace zx::cuda
