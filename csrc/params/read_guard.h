// Tells what operators are about to read.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <functional>
#include <memory>

namespace zx {

// Note [Reads wait for what they read]
// While gathers of updated parameters are hidden under the next forward, a read of a parameter has to wait for its
// bucket. Modules read each other's parameters (tied weights, functional calls), so hooks on modules can't see every
// read. Operators can: a callback like a profiler's sees the inputs of each operator before it runs, views included, on
// every Python thread and whatever the caller. It costs nothing once everything has been read.
//
// Code that torch.compile made calls few operators. Dynamo announces it as a region, without inputs. But if a region
// has a backward, its forward is an autograd function, "CompiledFunction", and that one is announced with everything
// that is read. A region that was never seen to call one, as in evaluation, waits for everything.
//
// Code that launches kernels without either is left to hooks on modules: see zerox/flow/overlap_gather.py.

// Tells a watcher what any thread is about to read, from construction until destruction or until the watcher has seen
// enough.
class ReadGuard {
 public:
  // One argument of an operator that is about to run.
  class Use {
   public:
    Use(const at::RecordFunction& function, size_t argument) : function_(function), argument_(argument) {}
    bool is_write() const;  // slow: copies the operator's schema

   private:
    const at::RecordFunction& function_;
    size_t argument_;
  };

  // Its functions are called by several threads at once, and must not throw. Operators that they run are not looked at.
  class Watcher {
   public:
    virtual ~Watcher() = default;
    virtual void before_read(const at::Tensor& tensor, const Use& use) = 0;
    virtual void before_hidden_reads() = 0;  // and hidden writes, of any memory
    virtual bool has_seen_enough() const = 0;
    // See Note [Forks].
    virtual void before_fork() = 0;        // by the parent, so that a child finds what is on its way
    virtual bool has_arrived() const = 0;  // whether all of it has; if not, the watcher stays, in the child too
  };

  explicit ReadGuard(std::shared_ptr<Watcher> watcher);
  ~ReadGuard();
  ReadGuard(const ReadGuard&) = delete;
  ReadGuard& operator=(const ReadGuard&) = delete;

  // Returns when everything that guards wait for has arrived. To be called without the GIL.
  static void before_fork();

  // What only the interpreter knows. To be set before the first guard is made.
  struct Interpreter {
    std::function<bool()> knows_this_thread;  // false for a backend's threads, which write what arrives
    std::function<bool()> names_are_new;      // whether a region's name may mean another one than at the last call
    std::function<void(const std::function<void()>&)> without_gil;  // runs a function without the GIL
  };
  static void set_interpreter(Interpreter interpreter);

  // For a watcher that waits before a read: other Python threads should go on meanwhile.
  static void without_gil(const std::function<void()>& body);

  // While it lives, the operators of this thread are not looked at: receiving a slice writes what others must not read
  // yet.
  class Pause {
   public:
    Pause();
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    bool before_;
  };

 private:
  std::shared_ptr<Watcher> watcher_;
};

}  // namespace zx
