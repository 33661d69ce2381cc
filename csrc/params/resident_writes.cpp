// What is written to parameters outside step(), and inside optimizer.whole(): see Note [Shards are pulled].
#include <algorithm>
#include <exception>

#include "check.h"
#include "params/residents.h"

namespace zx {

// The buckets are pinned.
void Residents::take_over(const std::vector<int64_t>& written) {
  std::vector<Held*> now;
  {
    const std::lock_guard lock(mutex_);
    if (now_.forgotten) return;
    for (const int64_t bucket : written) {
      Held& held = *held_[bucket];
      if (held.places.empty()) continue;  // the constructor is not through
      if (now_.whole > 0) continue;
      now.push_back(&held);
    }
  }
  if (now.empty()) return;
  std::string failure;
  ReadGuard::without_gil([&] {
    for (Held* held : now) held->room->await_pulls();  // others overwrite what it read from as soon as all have written
    {
      const std::lock_guard lock(mutex_);
      for (Held* held : now) held->words.at(ShardWord::written) = ++held->written;
      peers_->words_changed();
    }
    for (Held* held : now) {
      try {
        peers_->await_written(held->index, held->places, held->written);
      } catch (const std::exception& error) {
        failure = "zerox: parameters of " + held->name +
                  " were written here and not on all ranks: write on all, or inside optimizer.whole(). " +
                  reason_of(error);
        const std::lock_guard lock(mutex_);
        if (now_.failure.empty()) now_.failure = failure;
        return;
      }
      store_own(*held);
      const std::lock_guard lock(mutex_);
      held->words.at(ShardWord::stored) = held->written;
      peers_->words_changed();
      held->is_stale = true;
    }
  });
  if (!failure.empty()) ReadGuard::raise_soon(failure);
}

void Residents::store_own(Held& held) {
  held.room->store_shard(held.shard, own_part(held).start);
  held.room->serve(held.shard, held.served);
}

// ---- whole()

void Residents::enter_whole() {
  process_.check();
  size_t count = 0;
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    is_first = now_.whole++ == 0;
    count = held_.size();
  }
  for (size_t bucket = 0; bucket < count; ++bucket) pin(static_cast<int64_t>(bucket), nullptr);
  const std::lock_guard lock(mutex_);
  for (const auto& held : held_) held->room->begin_use();
  if (!is_first) return;
  for (const auto& held : held_) held->room->let_write(true);
  note_digests();
}

// Called under the lock.
void Residents::note_digests() {
  for (const auto& held : held_) held->digest = held->room->digest();
}

void Residents::refresh_whole() {
  enter_whole();
  leave_whole();
  const std::lock_guard lock(mutex_);
  note_digests();
}

void Residents::leave_whole() {
  const std::lock_guard lock(mutex_);
  --now_.whole;
  for (const auto& held : held_) {
    held->room->end_use();
    --held->pins;
    const bool is_resident = held->state == State::resident;
    if (now_.whole == 0 && held->writers == 0 && is_resident) held->room->let_write(false);
    if ((held->is_stale || held->is_old) && may_be_released(*held)) release(*held);
  }
  evict_for(0, nullptr);
}

// Ranks meet next, and may then overwrite their shards.
std::vector<int64_t> Residents::written_inside() const {
  await_pulls();
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> found;
  for (const auto& held : held_) {
    if (held->room->digest() != held->digest) found.push_back(held->index);
  }
  return found;
}

void Residents::keep_written(const std::vector<int64_t>& buckets) {
  const std::lock_guard lock(mutex_);
  for (const int64_t bucket : buckets) {
    Held& held = *held_.at(bucket);
    store_own(held);
    held.digest = held.room->digest();
  }
}

void Residents::drop_written(const std::vector<int64_t>& buckets) {
  const std::lock_guard lock(mutex_);
  for (const int64_t bucket : buckets) {
    Held& held = *held_.at(bucket);
    held.room->take_shard(held.shard, own_part(held).start);
    held.is_stale = true;
  }
}

}  // namespace zx
