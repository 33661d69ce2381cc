#include "residency/bucket_copies.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "params/read_guard.h"
#include "workers/ranges.h"

namespace zx {
namespace {

double mib(size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace

void BucketCopies::add(std::unique_ptr<ShardedBucket> added, Copy::State state, Locked /*lock*/) {
  uses_.add();
  cache_.add(added->room->bytes(), added->rows != nullptr, state);
  buckets_.push_back(std::move(added));
}

bool BucketCopies::has(int64_t bucket, const std::shared_ptr<Room>& room, Locked lock) const {
  return bucket >= 0 && bucket < size(lock) && buckets_[bucket]->room == room;
}

std::shared_ptr<Room> BucketCopies::make_room(size_t bytes, c10::Device device) {
  const Lock lock(mutex);
  return rooms_.make(bytes, device);
}

std::shared_ptr<Room> BucketCopies::make_table_room(size_t bytes, c10::Device device) {
  const Lock lock(mutex);
  return rooms_.make_for_table(bytes, device);
}

void BucketCopies::take_room(Room& room) {
  const Lock lock(mutex);
  rooms_.take(room);
}

size_t BucketCopies::room_bytes() {
  const Lock lock(mutex);
  return cache_.resident_bytes() + rooms_.spare().bytes();
}

// A bucket may have no room any more: see ShardedBucket.
void BucketCopies::begin_use(int64_t bucket) {
  if (!on_accelerator()) return;
  const Lock lock(mutex);
  if (buckets_[bucket]->room != nullptr) buckets_[bucket]->room->begin_use();
}

void BucketCopies::make_space(size_t bytes, const char* reader, Locked lock) {
  for (const int64_t bucket : cache_.victims(bytes)) release(bucket, lock);
  if (cache_.is_full(bytes) && reader != nullptr && !uses_.is_whole()) {
    TORCH_WARN_ONCE("zerox: ", reader, " reads parameters of ", mib(cache_.resident_bytes() + bytes),
                    " MiB at once, more than resident_mb=", mib(cache_.limit()),
                    " allows. They are all whole while it runs. Nothing is wrong but the memory that it takes");
  }
  const size_t most_spare = cache_.spare_bytes(bytes, bytes / SparePages::kChunkBytes * SparePages::kChunkBytes);
  if (rooms_.spare().bytes() > most_spare) rooms_.spare().trim(most_spare);
}

void BucketCopies::release(int64_t bucket, Locked lock) {
  const Range range("release", bucket);
  ShardedBucket& sharded = *buckets_[bucket];
  cache_.note_release(bucket);
  sharded.room->release();
  if (sharded.rows != nullptr) sharded.rows->forget();
  note(ResidencyEvent::Kind::release, bucket, lock);
}

void BucketCopies::release_if_free(int64_t bucket, Locked lock) {
  if (cache_.may_be_released(bucket)) release(bucket, lock);
}

void BucketCopies::forbid_writes(int64_t bucket, Locked /*lock*/) {
  const ShardedBucket& sharded = *buckets_[bucket];
  if (sharded.room != nullptr && sharded.is_filled() && !uses_.may_be_written(bucket)) sharded.room->let_write(false);
}

void BucketCopies::end(Locked lock) {
  is_over_ = true;
  for (int64_t bucket = 0; bucket < size(lock); ++bucket) cache_[bucket].may_go = false;
  drop_spare(lock);
}

// An operator can't be stopped.
void BucketCopies::restore_in_child(int64_t bucket) {
  ShardedBucket& sharded = *buckets_[bucket];
  Copy& copy = cache_[bucket];
  if (sharded.room == nullptr) return;
  if (copy.is_up_to_date()) {
    sharded.room->let_write(true);  // the child's own copy
    return;
  }
  copy.state = Copy::State::resident;
  copy.is_stale = copy.is_old = false;
  sharded.room->restore_in_child();
  ReadGuard::raise_soon("zerox: the parameters of " + sharded.name +
                        " were released when this process was forked, and a child can't fetch them. Fork inside "
                        "optimizer.whole(), or give the child a copy of the model that was made there");
}

}  // namespace zx
