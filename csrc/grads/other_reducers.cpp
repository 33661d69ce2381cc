#include "grads/other_reducers.h"

#include <mutex>
#include <unordered_set>
#include <utility>

#include "locks.h"

namespace zx {
namespace {

// These are leaked: bucket managers may be destroyed after static objects.
Mutex<LockRank::own_hooks>& mutex() {
  static auto* const made = new Mutex<LockRank::own_hooks>;
  return *made;
}
std::unordered_set<uintptr_t>& own_hooks() {
  static auto* const made = new std::unordered_set<uintptr_t>;
  return *made;
}
FindReduced& finder() {
  static auto* const made = new FindReduced;
  return *made;
}

}  // namespace

void add_own_hook(uintptr_t hook) {
  const std::lock_guard lock(mutex());
  own_hooks().insert(hook);
}

void remove_own_hook(uintptr_t hook) {
  const std::lock_guard lock(mutex());
  own_hooks().erase(hook);
}

bool is_own_hook(uintptr_t hook) {
  const std::lock_guard lock(mutex());
  return own_hooks().count(hook) > 0;
}

void set_find_reduced(FindReduced find) { finder() = std::move(find); }

int64_t find_reduced(const HookedByOthers& hooked) {
  if (hooked.params.empty()) return -1;
  return finder() ? finder()(hooked) : 0;
}

}  // namespace zx
