#include "params/read_guard.h"

#include <ATen/core/function_schema.h>
#include <c10/util/SmallVector.h>
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace zx {
namespace {

constexpr char kRegion[] = "Torch-Compiled Region";
constexpr char kShowsInputs[] = "CompiledFunction";

// A watcher is never destroyed under the lock: freeing its tensors may need the GIL.
struct Guards {
  std::mutex mutex;
  std::vector<std::shared_ptr<ReadGuard::Watcher>> watchers;
  at::CallbackHandle callback = 0;
  std::set<std::string> regions;  // the regions that have shown what they read: they always do
  ReadGuard::Interpreter interpreter;
};

void in_child();

// Never destroyed: threads run operators until the process is gone.
Guards& guards() {
  static Guards* const all = [] {
    pthread_atfork([] { guards().mutex.lock(); }, [] { guards().mutex.unlock(); }, &in_child);
    return new Guards;
  }();
  return *all;
}

// A forked child (a data-loader worker) has nothing to wait for. Its watchers are leaked: see Note [Forks].
void in_child() {
  auto* const watchers = new std::vector<std::shared_ptr<ReadGuard::Watcher>>();
  watchers->swap(guards().watchers);
  for (const auto& watcher : *watchers) {
    if (!watcher->has_arrived()) guards().watchers.push_back(watcher);
  }
  guards().mutex.unlock();
}

// A region of code that torch.compile made, for as long as it runs. Regions may be inside others.
class Region final : public at::ObserverContext {
 public:
  explicit Region(const char* name) : name_(name), outer_(std::exchange(innermost, this)) {
    const bool new_names = names_are_new();
    const std::lock_guard lock(guards().mutex);
    if (new_names) guards().regions.clear();
    shown_before_ = guards().regions.count(name_) != 0;
  }

  ~Region() override {
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
         tensor.storage().data() != nullptr;
}

void look_at(const c10::IValue& value, const ReadGuard::Use& use, ReadGuard::Watcher& watcher) {
  if (value.isTensor()) {
    if (has_memory(value.toTensor())) watcher.before_read(value.toTensor(), use);
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) look_at(each, use, watcher);
  }
}

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
    guards().watchers.erase(found);
  }
  stop_watching();
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  if (paused || !guards().interpreter.knows_this_thread()) return nullptr;
  const ReadGuard::Pause pause;
  c10::SmallVector<std::shared_ptr<ReadGuard::Watcher>, 2> watchers;
  {
    const std::lock_guard lock(guards().mutex);
    watchers.append(guards().watchers.begin(), guards().watchers.end());
  }
  if (watchers.empty()) stop_watching();  // a forked child's first operator
  std::unique_ptr<Region> region;
  const char* name = function.name();
  if (std::strncmp(name, kRegion, sizeof(kRegion) - 1) == 0) region = std::make_unique<Region>(name);
  if (std::strcmp(name, kShowsInputs) == 0) Region::note_inputs();
  for (const auto& watcher : watchers) {
    // Called without releasing the GIL: what Dynamo has looked up for the region should stay as it is.
    if (region && region->hides_reads()) watcher->before_hidden_reads();
    const auto inputs = function.inputs();
    for (size_t i = 0; i < inputs.size(); ++i) look_at(inputs[i], {function, i}, *watcher);
    if (watcher->has_seen_enough()) remove(watcher);
  }
  return region;
}

}  // namespace

ReadGuard::ReadGuard(std::shared_ptr<Watcher> watcher) : watcher_(std::move(watcher)) {
  const std::lock_guard lock(guards().mutex);
  guards().watchers.push_back(watcher_);
  if (guards().callback != 0) return;
  guards().callback = at::addGlobalCallback(
      at::RecordFunctionCallback(&before_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
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

bool ReadGuard::Use::is_write() const {
  const auto schema = function_.operator_schema();
  if (!schema || argument_ >= schema->arguments().size()) return true;  // for all we know
  const c10::AliasInfo* alias = schema->arguments()[argument_].alias_info();
  return alias != nullptr && alias->isWrite();
}

void ReadGuard::set_interpreter(Interpreter interpreter) { guards().interpreter = std::move(interpreter); }

void ReadGuard::without_gil(const std::function<void()>& body) { guards().interpreter.without_gil(body); }

ReadGuard::Pause::Pause() : before_(std::exchange(paused, true)) {}
ReadGuard::Pause::~Pause() { paused = before_; }

}  // namespace zx
