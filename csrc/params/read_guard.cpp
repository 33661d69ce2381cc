#include "params/read_guard.h"

#include <ATen/core/function_schema.h>
#include <c10/util/SmallVector.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "buckets/address.h"
#include "locks.h"
#include "torch_internals.h"

namespace zx {
namespace {

// What an operator does with an argument.
enum class Role : uint8_t { unknown, reads, views, writes };

// A watcher is never destroyed under the lock: freeing its tensors may need the GIL.
struct Guards {
  Mutex<LockRank::guards> mutex;
  std::vector<std::shared_ptr<ReadGuard::Watcher>> watchers;
  std::atomic<int64_t> num_on_all_threads = 0;  // watchers of all threads
  at::CallbackHandle callback = 0;
  std::unordered_map<const void*, std::vector<Role>> roles;  // by operators' names: see role_of()
  std::set<std::string> regions;  // the regions that have shown what they read: they always do
  ReadGuard::Interpreter interpreter;
  ReadGuard::BeforeCollective before_collective;
};

void in_child();

// Never destroyed: threads run operators until the process is gone.
Guards& guards() {
  static Guards* const all = [] {
    pthread_atfork([] { lock_at_fork(guards().mutex); }, [] { guards().mutex.unlock(); }, &in_child);
    return new Guards;
  }();
  return *all;
}

// A forked child (a data-loader worker) has nothing to wait for. Its watchers are leaked: see Note [Forks].
void in_child() {
  auto* const watchers = new std::vector<std::shared_ptr<ReadGuard::Watcher>>();
  watchers->swap(guards().watchers);
  guards().num_on_all_threads = 0;
  for (const auto& watcher : *watchers) {
    if (watcher->has_arrived()) continue;
    guards().num_on_all_threads += watcher->watches_all_threads() ? 1 : 0;
    guards().watchers.push_back(watcher);
  }
  guards().mutex.unlock();
}

// A region of code that torch.compile made, for as long as it runs. Regions may be inside others.
class Region {
 public:
  explicit Region(const char* name) : name_(name), outer_(std::exchange(innermost, this)) {
    const bool new_names = names_are_new();
    const std::lock_guard lock(guards().mutex);
    if (new_names) guards().regions.clear();
    shown_before_ = guards().regions.count(name_) != 0;
  }

  ~Region() {
    innermost = outer_;
    if (!shows_) return;
    const std::lock_guard lock(guards().mutex);
    guards().regions.insert(name_);
  }

  bool hides_reads() const { return !shown_before_; }

  static void note_inputs() {
    if (innermost != nullptr) innermost->shows_ = true;
  }

 private:
  static bool names_are_new() {
    try {
      return guards().interpreter.names_are_new();
    } catch (const std::exception&) {
      return true;  // for all we know
    }
  }

  static thread_local Region* innermost;
  std::string name_;
  Region* outer_;
  bool shown_before_ = false;
  bool shows_ = false;
};
thread_local Region* Region::innermost = nullptr;

thread_local bool paused = false;

// Tensors that stand for others (fake ones, wrappers) have no memory of their own: operators on the inner tensors
// follow.
bool has_memory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && !tensor.key_set().has(c10::DispatchKey::Python) &&
         data_ptr_of(tensor).get() != nullptr;
}

void look_at(const c10::IValue& value, const ReadGuard::Use& use, ReadGuard::Watcher& watcher) {
  if (value.isTensor()) {
    if (has_memory(value.toTensor())) watcher.before_read(value.toTensor(), use);
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) look_at(each, use, watcher);
  } else if (value.isTuple()) {
    for (const c10::IValue& each : value.toTupleRef().elements()) look_at(each, use, watcher);
  }
}

// What an operator does with its arguments; empty if it does not say. Slow: copies the operator's schema.
std::vector<Role> roles_by_schema(const at::RecordFunction& function) {
  std::vector<Role> roles;
  if (const auto schema = function.operator_schema()) {
    for (const c10::Argument& argument : schema->arguments()) {
      const auto* alias = argument.alias_info();
      roles.push_back(alias == nullptr ? Role::reads : alias->isWrite() ? Role::writes : Role::views);
    }
  }
  return roles;
}

bool is_torchs_own(const char* name) { return internals::begins_with(name, internals::kOwn); }

// torch's own schemas last as long as the process, so each is asked once, and known by the address of its name
// (overloads have one each). Others may be replaced by new ones in the same place.
Role role_of(const at::RecordFunction& function, size_t argument) {
  const auto answer = [&](const std::vector<Role>& roles) {
    return argument < roles.size() ? roles[argument] : Role::unknown;
  };
  const char* name = function.name();
  {
    const std::lock_guard lock(guards().mutex);
    const auto found = guards().roles.find(name);
    if (found != guards().roles.end()) return answer(found->second);
  }
  std::vector<Role> roles = roles_by_schema(function);
  const Role result = answer(roles);
  if (!roles.empty() && is_torchs_own(name)) {
    const std::lock_guard lock(guards().mutex);
    guards().roles.emplace(name, std::move(roles));
  }
  return result;
}

// What is pinned for an operator, for as long as it runs.
class Running final : public at::ObserverContext {
 public:
  // Also called if the operator throws.
  ~Running() override {
    if (pinned_.empty()) return;
    const ReadGuard::Pause pause;
    for (const auto& [watcher, pins] : pinned_) watcher->after_operator(pins);
  }

  // Where torch's own operators write, a version tells. Other people's kernels often write without.
  void note_writes(const at::RecordFunction& function) {
    const bool tells = is_torchs_own(function.name());
    for (auto& [watcher, pins] : pinned_) {
      for (ReadGuard::Pin& pin : pins) {
        const bool is_new = pin.version.enabled() && pin.version.current_version() != pin.version_before;
        pin.was_written = pin.may_write && (is_new || !tells);
      }
    }
  }

  void open_region(const char* name) { region_ = std::make_unique<Region>(name); }
  const Region* region() const { return region_.get(); }
  void pin(std::shared_ptr<ReadGuard::Watcher> watcher, ReadGuard::Pins pins) {
    pinned_.emplace_back(std::move(watcher), std::move(pins));
  }
  bool is_needed() const { return region_ != nullptr || !pinned_.empty(); }

 private:
  std::unique_ptr<Region> region_;
  c10::SmallVector<std::pair<std::shared_ptr<ReadGuard::Watcher>, ReadGuard::Pins>, 1> pinned_;
};

// Removes the callback if no watcher is left: operators then cost what they did without a guard.
void stop_watching() {
  at::CallbackHandle callback = 0;
  {
    const std::lock_guard lock(guards().mutex);
    if (guards().watchers.empty()) callback = std::exchange(guards().callback, 0);
  }
  if (callback != 0) at::removeCallback(callback);
}

void remove(const std::shared_ptr<ReadGuard::Watcher>& watcher) {
  std::shared_ptr<ReadGuard::Watcher> removed;  // destroyed after the lock is released
  {
    const std::lock_guard lock(guards().mutex);
    const auto found = std::find(guards().watchers.begin(), guards().watchers.end(), watcher);
    if (found == guards().watchers.end()) return;
    removed = std::move(*found);
    guards().num_on_all_threads -= removed->watches_all_threads() ? 1 : 0;
    guards().watchers.erase(found);
  }
  stop_watching();
}

using Watchers = c10::SmallVector<std::shared_ptr<ReadGuard::Watcher>, 2>;

Watchers watchers_now() {
  Watchers watchers;
  const std::lock_guard lock(guards().mutex);
  watchers.append(guards().watchers.begin(), guards().watchers.end());
  return watchers;
}

// Operators are called "namespace::name", functions in Python as their class is.
bool is_python_function(const char* name) { return std::strchr(name, ':') == nullptr; }

std::unique_ptr<at::ObserverContext> before_backward(const at::RecordFunction& function, const Watchers& watchers) {
  std::unique_ptr<Running> running;
  for (const auto& watcher : watchers) {
    ReadGuard::Pins pins;
    watcher->before_backward_of({function.name(), function.forwardThreadId(), function.seqNr()}, pins);
    if (pins.empty()) continue;
    if (!running) running = std::make_unique<Running>();
    running->pin(watcher, std::move(pins));
  }
  return running;
}

void before_collective(const at::RecordFunction& function, const Watchers& watchers) {
  if (!internals::is_collective_of_all(function.name()) || guards().before_collective == nullptr) return;
  const auto watches = [](const auto& watcher) { return watcher->watches_collectives(); };
  if (std::any_of(watchers.begin(), watchers.end(), watches)) guards().before_collective(function.inputs());
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  if (paused) return nullptr;
  const bool in_python = guards().interpreter.knows_this_thread();
  if (!in_python && guards().num_on_all_threads == 0) return nullptr;
  const ReadGuard::Pause pause;
  const Watchers watchers = watchers_now();
  if (watchers.empty()) stop_watching();  // a forked child's first operator
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) return before_backward(function, watchers);
  auto running = std::unique_ptr<Running>();
  const auto make_running = [&running] {
    if (!running) running = std::make_unique<Running>();
  };
  const char* name = function.name();
  if (internals::begins_with(name, internals::kRegion)) {
    make_running();
    running->open_region(name);
  }
  if (std::strcmp(name, internals::kShowsInputs) == 0) Region::note_inputs();
  if (in_python) before_collective(function, watchers);
  for (const auto& watcher : watchers) {
    if (!in_python && !watcher->watches_all_threads()) continue;
    ReadGuard::Pins pins;
    // Called without releasing the GIL: what Dynamo has looked up for the region should stay as it is.
    if (running && running->region() != nullptr && running->region()->hides_reads()) {
      watcher->before_hidden_reads(name, pins);
    }
    const auto inputs = function.inputs();
    for (size_t i = 0; i < inputs.size(); ++i) look_at(inputs[i], {function, i, pins}, *watcher);
    if (watcher->has_seen_enough()) remove(watcher);
    if (pins.empty()) continue;
    if (is_python_function(name)) {
      watcher->before_function({name, at::RecordFunction::currentThreadId(), function.seqNr()}, pins);
    }
    make_running();
    running->pin(watcher, std::move(pins));
  }
  return running;
}

void after_operator(const at::RecordFunction& function, at::ObserverContext* context) {
  if (context != nullptr) static_cast<Running*>(context)->note_writes(function);
}

}  // namespace

ReadGuard::ReadGuard(std::shared_ptr<Watcher> watcher) : watcher_(std::move(watcher)) {
  const std::lock_guard lock(guards().mutex);
  guards().watchers.push_back(watcher_);
  guards().num_on_all_threads += watcher_->watches_all_threads() ? 1 : 0;
  if (guards().callback != 0) return;
  guards().callback =
      at::addGlobalCallback(at::RecordFunctionCallback(&before_operator, &after_operator)
                                .needsInputs(true)
                                .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

ReadGuard::~ReadGuard() { remove(watcher_); }

void ReadGuard::before_fork() {
  std::vector<std::shared_ptr<ReadGuard::Watcher>> watchers;
  {
    const std::lock_guard lock(guards().mutex);
    watchers = guards().watchers;
  }
  for (const auto& watcher : watchers) watcher->before_fork();
}

bool ReadGuard::Use::pin(int64_t what, const at::Tensor& tensor, bool to_read) const {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const bool has_version = !tensor.is_inference() && impl->version_counter().enabled();
  const bool is_writer = !to_read && role_of(function_, argument_) == Role::writes;
  Pin pin{.what = what, .may_write = is_writer};
  if (has_version) {
    pin.version = impl->version_counter();
    pin.version_before = pin.version.current_version();
  }
  pins_.push_back(std::move(pin));
  return is_writer;
}

bool ReadGuard::Use::is_write(bool if_unknown) const {
  const Role role = role_of(function_, argument_);
  return role == Role::unknown ? if_unknown : role == Role::writes;
}

bool ReadGuard::Use::is_view() const { return role_of(function_, argument_) == Role::views; }

const c10::IValue* ReadGuard::Use::input(size_t argument) const {
  const auto inputs = function_.inputs();
  return argument < inputs.size() ? &inputs[argument] : nullptr;
}

void ReadGuard::set_interpreter(Interpreter interpreter) { guards().interpreter = std::move(interpreter); }

void ReadGuard::set_before_collective(BeforeCollective before_collective) {
  guards().before_collective = std::move(before_collective);
}

void ReadGuard::without_gil(const std::function<void()>& body) { guards().interpreter.without_gil(body); }

bool ReadGuard::raise_soon(const std::string& message) { return guards().interpreter.raise_soon(message); }

ReadGuard::Pause::Pause() : before_(std::exchange(paused, true)) {}
ReadGuard::Pause::~Pause() { paused = before_; }

}  // namespace zx
