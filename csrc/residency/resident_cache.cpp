// Which buckets go when room is short, and which come ahead of their reads: see Note [What is needed next].
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "residency/residents.h"
#include "workers/ranges.h"

namespace zx {
namespace {

double mib(size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace

// ---- what goes, under the lock

// Releases what is needed latest, until `bytes` more are within the limit.
void Residents::evict_for(size_t bytes, const char* reader) {
  const bool is_short = now_.resident_bytes + bytes > now_.limit;
  const auto uses = is_short ? past_.script.next_uses(buckets_.size()) : std::vector<int64_t>();
  const auto goes_first = [&uses](const ShardedBucket& one, const ShardedBucket& other) {
    const int64_t use = uses[one.index];
    const int64_t others = uses[other.index];
    return use != others ? use > others : one.touched < other.touched;
  };
  while (now_.resident_bytes + bytes > now_.limit) {
    ShardedBucket* victim = nullptr;
    for (const auto& sharded : buckets_) {
      if (may_be_released(*sharded) && (victim == nullptr || goes_first(*sharded, *victim))) victim = sharded.get();
    }
    if (victim == nullptr) break;
    release(*victim);
  }
  if (now_.resident_bytes + bytes > now_.limit && reader != nullptr && now_.whole == 0) {
    TORCH_WARN_ONCE("zerox: ", reader, " reads parameters of ", mib(now_.resident_bytes + bytes),
                    " MiB at once, more than resident_mb=", mib(now_.limit),
                    " allows. They are all whole while it runs. Nothing is wrong but the memory that it takes");
  }
  const size_t rest = now_.limit - std::min(now_.limit, now_.resident_bytes + bytes);
  if (rooms_.spare().bytes() > rest + bytes) rooms_.spare().trim(rest + bytes);
}

bool Residents::fits_beside_pinned(size_t bytes) const {
  for (const auto& sharded : buckets_) {
    if (sharded->state != State::released && !may_be_released(*sharded)) bytes += sharded->room->bytes();
  }
  return bytes <= now_.limit;
}

void Residents::release(ShardedBucket& sharded) {
  const Range range("release", sharded.index);
  sharded.state = State::released;
  sharded.is_stale = sharded.is_old = false;
  sharded.room->release();
  if (sharded.rows != nullptr) sharded.rows->forget();
  now_.resident_bytes -= std::exchange(sharded.held, 0);
  past_.log.note(ResidencyEvent::Kind::release, sharded.index, now_.resident_bytes);
}

void Residents::release_all() {
  const std::lock_guard lock(mutex_);
  for (const auto& sharded : buckets_) {
    if (may_be_released(*sharded)) release(*sharded);
  }
}

bool Residents::is_up_to_date(const ShardedBucket& sharded) const {
  return sharded.state == State::resident && !sharded.is_stale && !sharded.is_old;
}

bool Residents::is_read_now(const ShardedBucket& sharded) const { return sharded.pins - sharded.waiting > now_.whole; }

bool Residents::may_be_released(const ShardedBucket& sharded) const {
  const bool has_memory = sharded.state == State::resident || (sharded.state == State::released && sharded.held > 0);
  return sharded.pins == 0 && has_memory && !sharded.places.empty() && !now_.forgotten;
}

// ---- what comes ahead

// Called under the lock, when another bucket is read than before.
void Residents::look_ahead() {
  if (!(peers_->asks_others() || rooms_.on_accelerator()) || ahead_.is_under_way || now_.forgotten) return;
  ahead_.is_under_way = true;
  ahead_.worker.post([this] {
    const ReadGuard::Pause pause;
    std::unique_lock lock(mutex_);
    while (ShardedBucket* next = next_to_prefetch()) {
      ++next->pins;
      ++now_.counts.prefetches;
      const bool arrived = fetch_now(*next, lock, nullptr, /*ahead=*/true).empty();
      --next->pins;
      changed_.notify_all();
      if (!arrived) break;
    }
    ahead_.is_under_way = false;
  });
}

// The released bucket that is needed first, if there is room for it, or would be without what is needed later. None
// while a reader waits for another one.
Residents::ShardedBucket* Residents::next_to_prefetch() {
  if (now_.updating || now_.whole > 0 || now_.forgotten || !now_.failure.empty()) return nullptr;
  const std::vector<int64_t> uses = past_.script.next_uses(buckets_.size());
  ShardedBucket* next = nullptr;
  for (const auto& sharded : buckets_) {
    if (sharded->state != State::released || sharded->rows != nullptr) continue;
    if (sharded->pins > 0) return nullptr;
    if (uses[sharded->index] == ReadScript::kNever) continue;
    if (next == nullptr || uses[sharded->index] < uses[next->index]) next = sharded.get();
  }
  if (next == nullptr) return nullptr;
  size_t kept = next->room->bytes();
  for (const auto& sharded : buckets_) {
    const bool stays = !may_be_released(*sharded) || uses[sharded->index] < uses[next->index];
    if (sharded->state != State::released && stays) kept += sharded->room->bytes();
  }
  return kept <= now_.limit ? next : nullptr;
}

}  // namespace zx
