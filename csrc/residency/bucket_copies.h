// This rank's copies of all sharded buckets, and the lock on what is known of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "locks.h"
#include "residency/cache.h"
#include "residency/residency_report.h"
#include "residency/rooms.h"
#include "residency/sharded_bucket.h"
#include "residency/uses.h"
#include "workers/process.h"

namespace zx {

// Any thread may call any of these. Who takes the lock lets go of it: a function that is called under it has a `Locked`
// among its arguments, which it can't unlock. Nobody waits for a device, a message or another rank under it.
class BucketCopies {
 public:
  using Lock = std::unique_lock<Mutex<LockRank::bucket_copies>>;
  using Locked = const Lock&;

  explicit BucketCopies(HiddenReads hidden) : rooms_(hidden), cache_(uses_) {}
  BucketCopies(const BucketCopies&) = delete;
  BucketCopies& operator=(const BucketCopies&) = delete;

  mutable Mutex<LockRank::bucket_copies> mutex;
  Condition changed;  // of whether a bucket may be fetched, or has arrived

  // ---- under the lock

  Cache& cache(Locked /*lock*/) { return cache_; }
  Uses& uses(Locked /*lock*/) { return uses_; }
  ResidencyReport& report(Locked /*lock*/) { return report_; }

  // Appends a bucket. Its `index` must be size().
  void add(std::unique_ptr<ShardedBucket> added, Copy::State state, Locked lock);
  int64_t size(Locked /*lock*/) const { return static_cast<int64_t>(buckets_.size()); }
  bool has(int64_t bucket, const std::shared_ptr<Room>& room, Locked lock) const;

  // Releases what is needed latest, until `bytes` more are within the limit. If they can't be, `reader` is warned of,
  // unless it is null.
  void make_space(size_t bytes, const char* reader, Locked lock);
  void release(int64_t bucket, Locked lock);
  void release_if_free(int64_t bucket, Locked lock);
  // Its memory may only be read again, unless an operator or whole() still writes it.
  void forbid_writes(int64_t bucket, Locked lock);

  // Nothing is released any more: all is whole, or nobody reads it.
  void end(Locked lock);
  bool is_over(Locked /*lock*/) const { return is_over_; }
  // Frees what no bucket uses.
  void drop_spare(Locked /*lock*/) { rooms_.spare().trim(0); }

  void note(ResidencyEvent::Kind kind, int64_t bucket, Locked /*lock*/) {
    report_.log().note(kind, bucket, cache_.resident_bytes());
  }

  // ---- without

  // A bucket that was added, of which most is fixed.
  ShardedBucket& operator[](int64_t bucket) const { return *buckets_[bucket]; }
  bool on_accelerator() const { return rooms_.on_accelerator(); }
  HiddenReads hidden_reads() const { return rooms_.hidden_reads(); }
  bool hidden_reads_fault() const { return rooms_.hidden_reads_fault(); }
  // What it remembers of the calling thread.
  const Uses& uses_here() const { return uses_; }

  std::shared_ptr<Room> make_room(size_t bytes, c10::Device device);
  std::shared_ptr<Room> make_table_room(size_t bytes, c10::Device device);
  // A room that other copies were in. Rooms of one optimizer use each other's memory.
  void take_room(Room& room);
  size_t room_bytes();  // of what is resident, and spare
  // An operator of this thread reads it, on its current stream.
  void begin_use(int64_t bucket);

  // For tests: everything is released as soon as no operator uses it.
  void set_hostile(bool hostile) { is_hostile_ = hostile; }
  bool is_hostile() const { return is_hostile_; }

  // Whether this is a forked child of the process that made it, where nothing can be fetched and the lock may be held
  // for ever; and what a read finds there instead. See Note [Forks].
  bool is_in_child() const { return !process_.is_this(); }
  void check_process() const { process_.check(); }
  void restore_in_child(int64_t bucket);

 private:
  const Process process_;
  Rooms rooms_;
  std::atomic<bool> is_hostile_ = false;
  std::vector<std::unique_ptr<ShardedBucket>> buckets_;
  Uses uses_;
  Cache cache_;
  ResidencyReport report_;
  bool is_over_ = false;
};

}  // namespace zx
