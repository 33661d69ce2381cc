// Looks at what operators read before they read it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <functional>
#include <memory>

namespace zx {

// Note [Reads wait for what they read]
// While gathers of updated parameters are hidden under the next forward, whoever reads a parameter has to wait for its
// bucket first. Modules read each other's parameters (tied weights, functional calls), so hooks on modules can't know.
// Operators do: a callback like a profiler's sees the inputs of each one before it runs, views included, whoever calls
// it on whatever thread of Python's, and costs nothing once everything has been read.
//
// What torch.compile made calls few operators. Dynamo announces it as a region, without inputs; but where a region has
// a backward, its forward is an autograd function, "CompiledFunction", and that one is announced with all that is read.
// A region that was not seen to call one the last time, as in evaluation, waits for everything.
//
// What launches kernels without either is left to hooks on modules: see zerox/flow/overlap_gather.py.

// Tells a watcher what is about to be read, by all threads, from construction to destruction or until it has seen
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

  // Called by several threads at once; must not throw. Operators that it runs itself are not looked at.
  class Watcher {
   public:
    virtual ~Watcher() = default;
    virtual void before_read(const at::Tensor& tensor, const Use& use) = 0;
    virtual void before_hidden_reads() = 0;  // and writes, of whatever there is
    virtual bool has_seen_enough() const = 0;
    // See Note [Forks].
    virtual void before_fork() = 0;        // a child should find what is on its way
    virtual bool has_arrived() const = 0;  // all of it; else the watcher stays, in the child too
  };

  explicit ReadGuard(std::shared_ptr<Watcher> watcher);
  ~ReadGuard();
  ReadGuard(const ReadGuard&) = delete;
  ReadGuard& operator=(const ReadGuard&) = delete;

  // Returns when all that guards wait for has arrived; without the GIL.
  static void before_fork();

  // What only the interpreter knows; set before there is a guard.
  struct Interpreter {
    std::function<bool()> knows_this_thread;  // a backend's, which write what arrives, it does not know
    std::function<bool()> names_are_new;      // whether regions' names mean others than when it was asked last
    std::function<void(const std::function<void()>&)> without_gil;  // runs it so
  };
  static void set_interpreter(Interpreter interpreter);

  // For a watcher that waits before a read: other threads of Python's should run on.
  static void without_gil(const std::function<void()>& body);

  // While it lives, what this thread runs is not looked at: taking in what arrives writes what others must not read.
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
