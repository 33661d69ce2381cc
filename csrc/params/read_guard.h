// Tells what operators are about to read.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <c10/util/SmallVector.h>

#include <functional>
#include <memory>
#include <string>

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
// Code that launches kernels without either is left to hooks on modules: see zerox/params/overlap_gather.py.
//
// Where parameters are sharded (ZeRO stage 3), a watcher also has to know when the operator is over, to keep until then
// what it reads; and the backward of an autograd function in Python may read what its forward read, without an
// operator. Both are announced with the same thread and sequence number.

// Tells a watcher what any thread is about to read, from construction until destruction or until the watcher has seen
// enough.
class ReadGuard {
 public:
  // What an operator uses of a watcher's, from before it runs until it is over.
  struct Pin {
    int64_t what;                                                  // as the watcher likes
    c10::VariableVersion version{c10::VariableVersion::DISABLED};  // of the tensor through which it is used
    uint32_t version_before = 0;
    bool may_write = false;    // as the operator says; a function in Python says nothing, and its operators do
    bool was_written = false;  // told when the operator is over
  };
  using Pins = c10::SmallVector<Pin, 2>;

  // One argument of an operator that is about to run.
  class Use {
   public:
    Use(const at::RecordFunction& function, size_t argument, Pins& pins)
        : function_(function), argument_(argument), pins_(pins) {}
    const char* name() const { return function_.name(); }
    bool is_write(bool if_unknown = true) const;  // slow, unless the operator is one of torch's own
    // Whether the operator says that its result lies in the same memory, and so reads no value of it.
    bool is_view() const;
    size_t argument() const { return argument_; }
    const c10::IValue* input(size_t argument) const;  // null if it has not so many
    // The watcher's after_operator() will be called with this. Returns whether the operator may write it; not
    // `to_read`.
    bool pin(int64_t what, const at::Tensor& tensor, bool to_read) const;

   private:
    const at::RecordFunction& function_;
    size_t argument_;
    Pins& pins_;
  };

  // A call of an autograd function that is written in Python: its backward has the same number, of the same thread.
  struct PythonFunction {
    std::string name;
    uint64_t thread;
    int64_t number;
  };

  // Its functions are called by several threads at once, and must not throw. Operators that they run are not looked at.
  class Watcher {
   public:
    virtual ~Watcher() = default;
    virtual void before_read(const at::Tensor& tensor, const Use& use) = 0;
    virtual void before_hidden_reads(const char* reader, Pins& pins) = 0;  // and hidden writes, of any memory
    virtual bool has_seen_enough() const = 0;
    // For a watcher that pins what is used: called by the same thread, also if the operator throws.
    virtual void after_operator(const Pins& /*pins*/) {}
    virtual void before_function(const PythonFunction& /*function*/, const Pins& /*reads*/) {}
    virtual void before_backward_of(const PythonFunction& /*function*/, Pins& /*pins*/) {}
    // Whether it wants to know of other threads' operators than Python's.
    virtual bool watches_all_threads() const { return false; }
    // Whether it matters that ranks wait for each other in collectives of the script's: see before_collective().
    virtual bool watches_collectives() const { return false; }
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
    // Has this thread raise RuntimeError when it is in Python again; false if it is no thread of Python's.
    std::function<bool(const std::string&)> raise_soon;
  };
  static void set_interpreter(Interpreter interpreter);
  // Called with the arguments of each collective of torch.distributed, on the Python thread that is about to run it,
  // while a watcher watches them. Messages from one rank to another are none. It must not throw.
  using BeforeCollective = std::function<void(c10::ArrayRef<const c10::IValue> inputs)>;
  static void set_before_collective(BeforeCollective before_collective);

  // For a watcher that waits before a read: other Python threads should go on meanwhile.
  static void without_gil(const std::function<void()>& body);
  // An operator can't be stopped from a watcher: its caller raises when the operator is over.
  static bool raise_soon(const std::string& message);

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
