#include "residency/lease.h"

#include <mutex>
#include <vector>

#include "locks.h"

namespace zx {
namespace {

thread_local int num_postponed = 0;

struct Late {
  Mutex<LockRank::late_leases> mutex;
  std::vector<std::shared_ptr<const void>> kept;
};

Late& late() {
  static auto* const all = new Late;
  return *all;
}

}  // namespace

Lease::~Lease() {
  if (num_postponed == 0) return;
  const std::lock_guard lock(late().mutex);
  late().kept.push_back(std::move(kept_));
}

Lease::Postponed::Postponed() { ++num_postponed; }

Lease::Postponed::~Postponed() { --num_postponed; }

void Lease::end_late() {
  std::vector<std::shared_ptr<const void>> ended;  // destroyed without the lock
  const std::lock_guard lock(late().mutex);
  ended.swap(late().kept);
}

}  // namespace zx
