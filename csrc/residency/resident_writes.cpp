// What is written to parameters outside step(), and inside optimizer.whole(): see Note [Shards are pulled].
#include <algorithm>
#include <exception>
#include <utility>

#include "check.h"
#include "residency/residents.h"

namespace zx {

// The buckets are pinned.
void Residents::take_over(const std::vector<int64_t>& written) {
  std::vector<ShardedBucket*> now;
  {
    const std::lock_guard lock(mutex_);
    if (now_.forgotten) return;
    for (const int64_t bucket : written) {
      ShardedBucket& sharded = *buckets_[bucket];
      if (sharded.places.empty()) continue;  // the constructor is not through
      if (now_.whole > 0 || sharded.stays == Stays::kept) continue;
      now.push_back(&sharded);
    }
  }
  if (now.empty()) return;
  std::string failure;
  ReadGuard::without_gil([&] {
    // Others overwrite what it read from as soon as all have written.
    for (ShardedBucket* sharded : now) sharded->room->await_pulls();
    {
      const std::lock_guard lock(mutex_);
      for (ShardedBucket* sharded : now) sharded->stamps.at(ShardStamp::written) = ++sharded->written;
      peers_->stamps_changed();
    }
    for (ShardedBucket* sharded : now) {
      const Doing doing([sharded] { return "a write to the parameters of " + sharded->name; });
      try {
        if (peers_->await_written(sharded->index, sharded->places, sharded->written)) {
          keep(*sharded);
          continue;
        }
      } catch (const std::exception& error) {
        failure = "zerox: parameters of " + sharded->name +
                  " were written here and not on all ranks: write on all, or inside optimizer.whole(). " +
                  reason_of(error);
        const std::lock_guard lock(mutex_);
        if (now_.failure.empty()) now_.failure = failure;
        return;
      }
      store_own(*sharded);
      const std::lock_guard lock(mutex_);
      sharded->stamps.at(ShardStamp::stored) = sharded->written;
      peers_->stamps_changed();
      sharded->is_stale = true;
    }
  });
  if (!failure.empty()) ReadGuard::raise_soon(failure);
}

// Another rank stands by: see Note [Shards are pulled].
void Residents::keep(ShardedBucket& sharded) {
  TORCH_CHECK(sharded.rows == nullptr, "zerox: ", sharded.name,
              " was written on this rank, and another one is about to "
              "take rank 0's values: write tables on all ranks");
  const std::lock_guard lock(mutex_);
  ++sharded.pins;
  sharded.stays = Stays::kept;
  sharded.stamps.at(ShardStamp::written) = --sharded.written;
}

void Residents::stand_by(bool does) {
  process_.check();
  const std::lock_guard lock(mutex_);
  for (const auto& sharded : buckets_) sharded->stamps.at(ShardStamp::written) = does ? kStandsBy : sharded->written;
  peers_->stamps_changed();
}

std::vector<int64_t> Residents::kept() const {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> found;
  for (const auto& sharded : buckets_) {
    if (sharded->stays == Stays::kept) found.push_back(sharded->index);
  }
  return found;
}

void Residents::let_kept_go() {
  const std::lock_guard lock(mutex_);
  for (const auto& sharded : buckets_) {
    if (sharded->stays != Stays::kept) continue;
    sharded->stays = Stays::no;
    --sharded->pins;
    sharded->is_stale = true;
  }
}

void Residents::store_own(ShardedBucket& sharded) {
  sharded.room->store_shard(sharded.shard, own_shard(sharded));
  sharded.room->serve(sharded.shard, sharded.served, {});
}

// ---- whole()

void Residents::enter_whole() {
  process_.check();
  size_t count = 0;
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    is_first = now_.whole++ == 0;
    count = buckets_.size();
  }
  for (size_t bucket = 0; bucket < count; ++bucket) pin(static_cast<int64_t>(bucket), nullptr);
  const std::lock_guard lock(mutex_);
  for (const auto& sharded : buckets_) sharded->room->begin_use();
  if (!is_first) return;
  for (const auto& sharded : buckets_) sharded->room->let_write(true);
  note_digests();
}

// Called under the lock.
void Residents::note_digests() {
  for (const auto& sharded : buckets_) sharded->digest = sharded->room->digest();
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
  for (const auto& sharded : buckets_) {
    sharded->room->end_use();
    --sharded->pins;
    const bool is_resident = sharded->state == State::resident;
    if (now_.whole == 0 && sharded->writers == 0 && is_resident) sharded->room->let_write(false);
    if (sharded->pins == 0) sharded->room->let_ask(false);
    if ((sharded->is_stale || sharded->is_old) && may_be_released(*sharded)) release(*sharded);
  }
  evict_for(0, nullptr);
}

// Ranks synchronize next, and may then overwrite their shards.
std::vector<int64_t> Residents::written_inside() const {
  await_pulls();
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> found;
  for (const auto& sharded : buckets_) {
    if (sharded->room->digest() != sharded->digest) found.push_back(sharded->index);
  }
  return found;
}

void Residents::keep_written(const std::vector<int64_t>& buckets) {
  const std::lock_guard lock(mutex_);
  for (const int64_t bucket : buckets) {
    ShardedBucket& sharded = *buckets_.at(bucket);
    store_own(sharded);
    sharded.digest = sharded.room->digest();
  }
}

void Residents::drop_written(const std::vector<int64_t>& buckets) {
  const std::lock_guard lock(mutex_);
  for (const int64_t bucket : buckets) {
    ShardedBucket& sharded = *buckets_.at(bucket);
    sharded.room->take_shard(sharded.shard, own_shard(sharded));
    sharded.is_stale = true;
  }
}

}  // namespace zx
