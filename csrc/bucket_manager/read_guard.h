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
// it, and costs nothing once everything has arrived. What torch.compile made calls few operators: there the hooks of
// zerox/overlap_gather.py wait.

// Calls `before_read` for each input of each operator that this thread runs, from construction to destruction. It must
// not throw; operators that it runs itself are not looked at.
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

  using BeforeRead = std::function<void(const at::Tensor&, const Use&)>;
  explicit ReadGuard(BeforeRead before_read);
  ~ReadGuard();
  ReadGuard(const ReadGuard&) = delete;
  ReadGuard& operator=(const ReadGuard&) = delete;

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
  std::shared_ptr<const BeforeRead> before_read_;
};

}  // namespace zx
