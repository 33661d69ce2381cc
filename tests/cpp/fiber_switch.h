// Where a fiber goes on, and the way there from another one.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace zx::cuda::on_host {

#if defined(__x86_64__)

// Leaves on the stack all that a function has to keep for its caller. swapcontext() also keeps the mask of signals, by
// a system call, which took longer than most of what kernels do between two barriers.
[[gnu::naked, gnu::noinline]] inline void switch_stacks(void** /*from*/, void* /*to*/) {
  asm(R"(
      pushq %rbp
      pushq %rbx
      pushq %r12
      pushq %r13
      pushq %r14
      pushq %r15
      movq %rsp, (%rdi)
      movq %rsi, %rsp
      popq %r15
      popq %r14
      popq %r13
      popq %r12
      popq %rbx
      popq %rbp
      ret
  )");
}

class Context {
 public:
  // To begin with entry(), which must not return.
  void prepare(void* stack, size_t bytes, void (*entry)()) {
    auto* const top = reinterpret_cast<void**>(static_cast<char*>(stack) + bytes);
    top[-1] = nullptr;  // entry's return address, which also aligns its frame
    top[-2] = reinterpret_cast<void*>(entry);
    for (int saved = 3; saved <= 8; ++saved) top[-saved] = nullptr;
    at_ = top - 8;
  }
  static void swap(Context& from, const Context& to) { switch_stacks(&from.at_, to.at_); }

 private:
  void* at_ = nullptr;
};

#else

class Context {
 public:
  void prepare(void* stack, size_t bytes, void (*entry)()) {
    getcontext(&at_);
    at_.uc_stack.ss_sp = stack;
    at_.uc_stack.ss_size = bytes;
    at_.uc_link = nullptr;
    makecontext(&at_, entry, 0);
  }
  static void swap(Context& from, const Context& to) { swapcontext(&from.at_, &to.at_); }

 private:
  ucontext_t at_{};
};

#endif

}  // namespace zx::cuda::on_host
