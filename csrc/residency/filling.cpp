#include "residency/filling.h"

#include <c10/util/Exception.h>

#include <string>

#include "peers/doing.h"

namespace zx {

// What is filled here may go once all have filled it.
void Filling::let_first_go() {
  const int64_t bucket = filled_.front();
  const Doing doing([this, bucket] { return "the first values of " + copies_[bucket].name; });
  peers_->await_filled(copies_[bucket].places);
  const BucketCopies::Lock lock(copies_.mutex);
  copies_.cache(lock)[bucket].may_go = true;
  filled_.pop_front();
}

void Filling::begin(int64_t bucket) {
  Room& room = *copies_[bucket].room;
  const auto has_space = [&] {
    const BucketCopies::Lock lock(copies_.mutex);
    return copies_.cache(lock).fits_beside_pinned(room.bytes());
  };
  while (!filled_.empty() && !has_space()) let_first_go();
  {
    const BucketCopies::Lock lock(copies_.mutex);
    Cache& cache = copies_.cache(lock);
    copies_.make_space(room.bytes(), nullptr, lock);
    cache.hold(bucket, room.bytes());
    cache.touch(bucket);
  }
  room.restore();
  room.clear();
  room.end_fetch();
  room.let_write(true);
  room.begin_use();
  const BucketCopies::Lock lock(copies_.mutex);
  copies_.cache(lock)[bucket].state = Copy::State::resident;
}

void Filling::end(int64_t bucket, std::vector<ShardPlace> by_rank) {
  ShardedBucket& sharded = copies_[bucket];
  const bool was_filled = sharded.is_filled();
  {
    const BucketCopies::Lock lock(copies_.mutex);
    sharded.places = std::move(by_rank);
  }
  if (!was_filled) publisher_.publish_first(sharded);
  bool is_whole = false;
  {
    const BucketCopies::Lock lock(copies_.mutex);
    Copy& copy = copies_.cache(lock)[bucket];
    copy.may_go = was_filled || sharded.rows != nullptr;
    if (!copy.may_go) filled_.push_back(bucket);
    is_whole = copies_.uses(lock).is_whole();
    if (copy.state == Copy::State::resident) {
      copies_.forbid_writes(bucket, lock);
      sharded.room->end_use();
    }
    if (!copies_.uses(lock).is_pinned(bucket)) sharded.room->let_ask(false);
  }
  if (!is_whole) return;
  const std::string failure = turns_.bring(bucket, nullptr);  // of a table no row is here
  TORCH_CHECK(failure.empty(), failure);
  copies_.begin_use(bucket);
  publisher_.note_digest(bucket);
}

void Filling::await_filled() {
  while (!filled_.empty()) let_first_go();
}

}  // namespace zx
