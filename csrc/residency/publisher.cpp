#include "residency/publisher.h"

#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <string>

#include "check.h"
#include "params/read_guard.h"

namespace zx {

std::vector<ShardedBucket*> Publisher::all() const {
  const BucketCopies::Lock lock(copies_.mutex);
  std::vector<ShardedBucket*> found;
  for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) found.push_back(&copies_[bucket]);
  return found;
}

void Publisher::announce(ShardedBucket& sharded, bool is_filled) {
  if (is_filled) sharded.room->serve(sharded.shard, sharded.served, {});
  sharded.stamps.at(ShardStamp::version) = is_filled ? version_ : kNotFilled;
  sharded.stamps.at(ShardStamp::came) = came_;
  sharded.address = sharded.shard.const_data_ptr();
  peers_->add(sharded.served, sharded.stamps);
  digests_.push_back(0);
}

void Publisher::publish_first(ShardedBucket& sharded) {
  sharded.room->serve(sharded.shard, sharded.served, {});
  {
    const BucketCopies::Lock lock(copies_.mutex);
    sharded.stamps.at(ShardStamp::version).store(version_, std::memory_order_release);
  }
  peers_->stamps_changed();
}

void Publisher::give_up_filling() {
  for (ShardedBucket* sharded : all()) {
    if (!sharded->is_filled()) sharded->stamps.at(ShardStamp::version) = kNeverFilled;
  }
  peers_->stamps_changed();
}

// ---- step()

void Publisher::begin_update() {
  const BucketCopies::Lock lock(copies_.mutex);
  for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) {
    const ShardedBucket& sharded = copies_[bucket];
    if (copies_.uses(lock).is_whole()) sharded.room->end_use();  // by who reads without operators
    sharded.room->begin_use();                                   // the shard will be written, which was copied from
    const bool is_in_place = sharded.shard.const_data_ptr() == sharded.address;
    if (!is_in_place) {
      copies_.report(lock).fail("zerox: this rank's shard of " + sharded.name +
                                " lies in other memory than when the optimizer was built, and other ranks would read "
                                "the old one: build the optimizer anew");
    }
  }
}

void Publisher::publish(int64_t bucket, const at::Tensor& rows) {
  ShardedBucket& sharded = copies_[bucket];
  sharded.room->serve(sharded.shard, sharded.served, rows);
  {
    const BucketCopies::Lock lock(copies_.mutex);
    sharded.stamps.at(ShardStamp::version).store(version_ + 1, std::memory_order_release);
  }
  peers_->stamps_changed();
}

void Publisher::end_update(bool any_written) {
  for (ShardedBucket* sharded : all()) {
    const bool is_published = sharded->stamps.get(ShardStamp::version) == version_ + 1;
    if (any_written && !is_published && sharded->is_filled()) {
      sharded->room->serve(sharded->shard, sharded->served, {});
    }
  }
  {
    const BucketCopies::Lock lock(copies_.mutex);
    ++version_;
    copies_.note(ResidencyEvent::Kind::step, -1, lock);
    for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) {
      ShardedBucket& sharded = copies_[bucket];
      if (!sharded.is_filled()) continue;
      sharded.stamps.at(ShardStamp::version).store(version_, std::memory_order_release);
      copies_.uses(lock).let_go(bucket, Stays::lent);
      Copy& copy = copies_.cache(lock)[bucket];
      if (copies_.cache(lock).may_be_released(bucket)) {
        copies_.release(bucket, lock);
      } else {  // inside whole(), or an operator of another thread reads it
        copy.is_old = copy.state == Copy::State::resident;
        if (sharded.rows != nullptr) sharded.rows->forget();
      }
    }
  }
  peers_->stamps_changed();
}

void Publisher::await_pulls() const {
  std::vector<std::shared_ptr<Room>> rooms;
  for (const ShardedBucket* sharded : all()) {
    if (sharded->room != nullptr) rooms.push_back(sharded->room);
  }
  for (const auto& room : rooms) room->await_pulls();
}

// ---- what operators write

std::vector<ShardedBucket*> Publisher::to_take_over(const std::vector<int64_t>& written) const {
  const BucketCopies::Lock lock(copies_.mutex);
  std::vector<ShardedBucket*> found;
  if (copies_.is_over(lock) || copies_.uses(lock).is_whole()) return found;
  for (const int64_t bucket : written) {
    if (copies_[bucket].places.empty()) continue;  // the constructor is not through
    const Stays why = copies_.uses(lock).stays(bucket);
    if (why != Stays::kept && why != Stays::here_only) found.push_back(&copies_[bucket]);
  }
  return found;
}

void Publisher::take_over(const std::vector<int64_t>& written) {
  const std::vector<ShardedBucket*> now = to_take_over(written);
  if (now.empty()) return;
  std::string failure;
  int64_t came = 0;
  ReadGuard::without_gil([&] {
    // Others overwrite what it read from as soon as all have written.
    for (ShardedBucket* sharded : now) sharded->room->await_pulls();
    {
      const BucketCopies::Lock lock(copies_.mutex);
      came = came_;
      for (ShardedBucket* sharded : now) sharded->stamps.at(ShardStamp::written) = ++sharded->written;
    }
    peers_->stamps_changed();
    for (ShardedBucket* sharded : now) {
      const Doing doing([sharded] {
        return "a write to the parameters of " + sharded->name +
               " (all ranks write them, or one writes copy.deepcopy(model))";
      });
      try {
        const Written found = peers_->await_written(sharded->index, sharded->places, sharded->written, came);
        if (found != Written::everywhere) {
          const std::string refused = keep(*sharded, found == Written::here_only ? Stays::here_only : Stays::kept);
          if (!refused.empty()) failure = refused;
          continue;
        }
      } catch (const std::exception& error) {
        failure = "zerox: parameters of " + sharded->name +
                  " were written here and not on all ranks: write on all, or inside optimizer.whole(). " +
                  reason_of(error);
        const BucketCopies::Lock lock(copies_.mutex);
        copies_.report(lock).fail(failure);
        return;
      }
      store(*sharded);
      {
        const BucketCopies::Lock lock(copies_.mutex);
        sharded->stamps.at(ShardStamp::stored) = sharded->written;
        copies_.cache(lock)[sharded->index].is_stale = true;
      }
      peers_->stamps_changed();
    }
  });
  if (!failure.empty()) ReadGuard::raise_soon(failure);
}

void Publisher::store(const ShardedBucket& sharded) const {
  const auto state = [&] {
    const BucketCopies::Lock lock(copies_.mutex);
    return state_.lock();
  }();
  std::optional<PublishedState::Change> change;
  if (state) change.emplace(*state, StateChange::of_all);
  fetcher_.store_own(sharded);
  if (change) change->done();
}

// Another rank does not write it. Returns why it can't stay as it is; else empty.
std::string Publisher::keep(ShardedBucket& sharded, Stays why) {
  const BucketCopies::Lock lock(copies_.mutex);
  const bool can_stay = sharded.rows == nullptr && copies_.uses(lock).stays(sharded.index) == Stays::no;
  if (can_stay) copies_.uses(lock).keep(sharded.index, why);
  if (!can_stay || why == Stays::kept) take_back(sharded);
  if (can_stay) return "";
  copies_.cache(lock)[sharded.index].is_old = true;  // all of it is fetched
  const std::string refused = "zerox: parameters of " + sharded.name +
                              " were written here and not on all ranks, and what was written is taken back: write " +
                              (sharded.rows == nullptr ? "on all" : "tables on all ranks");
  copies_.report(lock).fail(refused);
  return refused;
}

// Nobody stores what only this rank has written. To be called under the lock.
void Publisher::take_back(ShardedBucket& sharded) {
  sharded.written = sharded.stamps.get(ShardStamp::stored);
  std::atomic<int64_t>& told = sharded.stamps.at(ShardStamp::written);
  if (told < kStandsBy) told = sharded.written;
}

void Publisher::stand_by(bool does) {
  {
    const BucketCopies::Lock lock(copies_.mutex);
    for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) {
      ShardedBucket& sharded = copies_[bucket];
      sharded.stamps.at(ShardStamp::written) = does ? kStandsBy : sharded.written;
    }
  }
  peers_->stamps_changed();
}

void Publisher::come() {
  {
    const BucketCopies::Lock lock(copies_.mutex);
    ++came_;
    for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) {
      copies_[bucket].stamps.at(ShardStamp::came).store(came_, std::memory_order_release);
    }
  }
  peers_->stamps_changed();
}

bool Publisher::is_awaited() const {
  std::vector<std::pair<std::vector<ShardPlace>, const SharedStamps*>> known;
  {
    const BucketCopies::Lock lock(copies_.mutex);
    for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) {
      known.emplace_back(copies_[bucket].places, &copies_[bucket].stamps);
    }
  }
  for (const auto& [places, own] : known) {
    if (peers_->is_ahead(places, own->get(ShardStamp::written), own->get(ShardStamp::came))) return true;
  }
  return peers_->is_asked_for_writes();
}

void Publisher::come_nowhere() {
  const BucketCopies::Lock lock(copies_.mutex);
  came_ = INT64_MAX;
}

std::vector<int64_t> Publisher::kept(Stays why) const {
  const BucketCopies::Lock lock(copies_.mutex);
  std::vector<int64_t> found;
  for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) {
    if (copies_.uses(lock).stays(bucket) == why) found.push_back(bucket);
  }
  return found;
}

void Publisher::let_kept_go(Stays why) {
  const BucketCopies::Lock lock(copies_.mutex);
  for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) {
    if (!copies_.uses(lock).let_go(bucket, why)) continue;
    Copy& copy = copies_.cache(lock)[bucket];
    if (why == Stays::kept) {
      copy.is_stale = true;
      continue;
    }
    copy.is_old = copy.state == Copy::State::resident;  // all of it is fetched
    take_back(copies_[bucket]);                         // not before: another rank that wrote it may still look
  }
}

// ---- inside whole(): the buckets are pinned

void Publisher::note_digests() {
  for (const ShardedBucket* sharded : all()) note_digest(sharded->index);
}

void Publisher::note_digest(int64_t bucket) { digests_.at(bucket) = copies_[bucket].room->digest(); }

// Ranks synchronize next, and may then overwrite their shards.
std::vector<int64_t> Publisher::written_inside() const {
  await_pulls();
  std::vector<int64_t> found;
  for (const ShardedBucket* sharded : all()) {
    if (sharded->is_filled() && sharded->room->digest() != digests_.at(sharded->index)) found.push_back(sharded->index);
  }
  return found;
}

void Publisher::keep_written(const std::vector<int64_t>& buckets) {
  for (const int64_t bucket : buckets) {
    store(copies_[bucket]);
    note_digest(bucket);
  }
}

void Publisher::drop_written(const std::vector<int64_t>& buckets) {
  for (const int64_t bucket : buckets) {
    fetcher_.take_own(copies_[bucket]);
    const BucketCopies::Lock lock(copies_.mutex);
    copies_.cache(lock)[bucket].is_stale = true;
  }
}

// ---- the end

void Publisher::say_left() {
  for (ShardedBucket* sharded : all()) sharded->stamps.at(ShardStamp::left) = 1;
  peers_->say_left();
}

bool Publisher::is_read_by_others() const {
  for (const ShardedBucket* sharded : all()) {
    for (int rank = 0; rank < static_cast<int>(sharded->places.size()); ++rank) {
      if (rank != peers_->rank() && !peers_->has_left(rank, sharded->places[rank])) return true;
    }
  }
  return false;
}

}  // namespace zx
