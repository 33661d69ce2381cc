#include "residency/handover.h"

#include <utility>

namespace zx {

bool Handover::is_free(int64_t bucket) {
  turns_.await_ahead(bucket);
  const BucketCopies::Lock lock(copies_.mutex);
  const Copy& copy = copies_.cache(lock)[bucket];
  return copy.may_go && !copy.is_table && !copies_.uses(lock).is_pinned(bucket);
}

int64_t Handover::version() {
  const BucketCopies::Lock lock(copies_.mutex);
  return publisher_.version(lock);
}

bool Handover::begin(const std::vector<int64_t>& buckets) {
  turns_.begin_update();
  for (const int64_t bucket : buckets) turns_.await_ahead(bucket);
  publisher_.await_pulls();
  const BucketCopies::Lock lock(copies_.mutex);
  bool are_free = true;
  for (const int64_t bucket : buckets) {
    copies_.release_if_free(bucket, lock);
    are_free =
        are_free && copies_.cache(lock)[bucket].state == Copy::State::released && !copies_.uses(lock).is_pinned(bucket);
  }
  return are_free;
}

std::shared_ptr<Room> Handover::give(int64_t bucket) {
  const BucketCopies::Lock lock(copies_.mutex);
  std::shared_ptr<Room> room = std::exchange(copies_[bucket].room, {});
  copies_.cache(lock).give_away(bucket);
  readers_.forget_addresses_of(*room, lock);
  return room;
}

void Handover::end() {
  {
    const BucketCopies::Lock lock(copies_.mutex);
    copies_.drop_spare(lock);  // the new optimizer has a limit of its own
  }
  turns_.end_update();
}

}  // namespace zx
