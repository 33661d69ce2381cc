// Which buckets go when room is short, and which come ahead of their reads: see Note [What is needed next].
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "params/residents.h"
#include "workers/ranges.h"

namespace zx {
namespace {

double mib(size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace

// ---- what goes, under the lock

// Releases what is needed latest, until `bytes` more are within the limit.
void Residents::evict_for(size_t bytes, const char* reader) {
  const bool is_short = now_.resident_bytes + bytes > now_.limit;
  const auto uses = is_short ? past_.script.next_uses(held_.size()) : std::vector<int64_t>();
  const auto goes_first = [&uses](const Held& one, const Held& other) {
    const int64_t use = uses[one.index];
    const int64_t others = uses[other.index];
    return use != others ? use > others : one.touched < other.touched;
  };
  while (now_.resident_bytes + bytes > now_.limit) {
    Held* victim = nullptr;
    for (const auto& held : held_) {
      if (may_be_released(*held) && (victim == nullptr || goes_first(*held, *victim))) victim = held.get();
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
  for (const auto& held : held_) {
    if (held->state != State::released && !may_be_released(*held)) bytes += held->room->bytes();
  }
  return bytes <= now_.limit;
}

void Residents::release(Held& held) {
  const Range range("release", held.index);
  held.state = State::released;
  held.is_stale = held.is_old = false;
  if (!rooms_.on_accelerator()) keep_fault_handler();
  held.room->release();
  now_.resident_bytes -= held.room->bytes();
  past_.log.note(ResidencyEvent::Kind::release, held.index, now_.resident_bytes);
}

void Residents::release_all() {
  const std::lock_guard lock(mutex_);
  for (const auto& held : held_) {
    if (may_be_released(*held)) release(*held);
  }
}

bool Residents::is_up_to_date(const Held& held) const {
  return held.state == State::resident && !held.is_stale && !held.is_old;
}

bool Residents::is_read_now(const Held& held) const { return held.pins - held.waiting > now_.whole; }

bool Residents::may_be_released(const Held& held) const {
  return held.pins == 0 && held.state == State::resident && !held.places.empty() && !now_.forgotten;
}

// ---- what comes ahead

// Called under the lock, when another bucket is read than before.
void Residents::look_ahead() {
  if (!(peers_->asks_others() || rooms_.on_accelerator()) || ahead_.is_under_way || now_.forgotten) return;
  ahead_.is_under_way = true;
  ahead_.worker.post([this] {
    const ReadGuard::Pause pause;
    std::unique_lock lock(mutex_);
    while (Held* next = next_to_prefetch()) {
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
Residents::Held* Residents::next_to_prefetch() {
  if (now_.updating || now_.whole > 0 || now_.forgotten || !now_.failure.empty()) return nullptr;
  const std::vector<int64_t> uses = past_.script.next_uses(held_.size());
  Held* next = nullptr;
  for (const auto& held : held_) {
    if (held->state != State::released) continue;
    if (held->pins > 0) return nullptr;
    if (uses[held->index] == ReadScript::kNever) continue;
    if (next == nullptr || uses[held->index] < uses[next->index]) next = held.get();
  }
  if (next == nullptr) return nullptr;
  size_t kept = next->room->bytes();
  for (const auto& held : held_) {
    const bool stays = !may_be_released(*held) || uses[held->index] < uses[next->index];
    if (held->state != State::released && stays) kept += held->room->bytes();
  }
  return kept <= now_.limit ? next : nullptr;
}

}  // namespace zx
