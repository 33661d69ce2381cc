#include "bucket_manager/read_guard.h"

#include <ATen/core/function_schema.h>

#include <algorithm>
#include <vector>

namespace zx {
namespace {

// Of one thread. A guard may be destroyed on another one: then it is found expired here.
struct Guards {
  std::vector<std::weak_ptr<const ReadGuard::BeforeRead>> all;
  at::CallbackHandle callback = 0;
  bool paused = false;
};
thread_local Guards guards;

// Tensors that stand for others (fake ones, wrappers) have no memory of their own: operators on what is inside follow.
bool has_memory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && !tensor.key_set().has(c10::DispatchKey::Python) &&
         tensor.storage().data() != nullptr;
}

void look_at(const c10::IValue& value, const ReadGuard::Use& use, const ReadGuard::BeforeRead& before_read) {
  if (value.isTensor()) {
    if (has_memory(value.toTensor())) before_read(value.toTensor(), use);
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) look_at(each, use, before_read);
  }
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  if (guards.paused) return nullptr;
  const ReadGuard::Pause pause;
  for (const auto& weak : guards.all) {
    const auto before_read = weak.lock();
    if (!before_read) continue;
    const auto inputs = function.inputs();
    for (size_t i = 0; i < inputs.size(); ++i) look_at(inputs[i], {function, i}, *before_read);
  }
  return nullptr;
}

}  // namespace

ReadGuard::ReadGuard(BeforeRead before_read)
    : before_read_(std::make_shared<const BeforeRead>(std::move(before_read))) {
  guards.all.push_back(before_read_);
  if (guards.callback != 0) return;
  guards.callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&before_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

bool ReadGuard::Use::is_write() const {
  const auto schema = function_.operator_schema();
  if (!schema || argument_ >= schema->arguments().size()) return true;  // for all we know
  const c10::AliasInfo* alias = schema->arguments()[argument_].alias_info();
  return alias != nullptr && alias->isWrite();
}

ReadGuard::Pause::Pause() : before_(guards.paused) { guards.paused = true; }
ReadGuard::Pause::~Pause() { guards.paused = before_; }

ReadGuard::~ReadGuard() {
  before_read_.reset();
  std::erase_if(guards.all, [](const auto& weak) { return weak.expired(); });
  if (!guards.all.empty() || guards.callback == 0) return;
  at::removeCallback(guards.callback);
  guards.callback = 0;
}

}  // namespace zx
