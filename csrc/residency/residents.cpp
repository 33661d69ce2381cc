#include "residency/residents.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <utility>

#include "locks.h"

namespace zx {
namespace {

// Where shards start, counted in elements of one of them.
std::vector<size_t> in_bytes(const std::vector<int64_t>& starts, const at::Tensor& shard) {
  std::vector<size_t> found;
  for (const int64_t start : starts) found.push_back(start * shard.element_size());
  return found;
}

}  // namespace

Residents::Residents(std::shared_ptr<const PeerShards> peers, HiddenReads hidden)
    : peers_(std::move(peers)),
      copies_(hidden),
      fetcher_(peers_),
      publisher_(copies_, fetcher_, peers_),
      turns_(copies_, fetcher_, publisher_, peers_->asks_others()),
      readers_(copies_, turns_, publisher_),
      handover_(copies_, turns_, publisher_, readers_),
      filling_(copies_, turns_, publisher_, peers_) {
  if (peers_->linger() != nullptr) reader_.emplace(peers_->linger());
}

// ---- buckets

int64_t Residents::add(std::string name, std::shared_ptr<Room> room, at::Tensor shard,
                       const std::vector<int64_t>& shard_starts, bool is_served) {
  auto added = std::make_unique<ShardedBucket>();
  added->name = std::move(name);
  added->room = std::move(room);
  added->shard = std::move(shard);
  added->starts = in_bytes(shard_starts, added->shard);
  return add(std::move(added), is_served, /*is_filled=*/false);
}

int64_t Residents::take(std::string name, std::shared_ptr<Room> room, at::Tensor shard,
                        const std::vector<int64_t>& shard_starts, bool is_served) {
  copies_.take_room(*room);
  auto added = std::make_unique<ShardedBucket>();
  added->name = std::move(name);
  added->room = std::move(room);
  added->shard = std::move(shard);
  added->starts = in_bytes(shard_starts, added->shard);
  return add(std::move(added), is_served, /*is_filled=*/true);
}

int64_t Residents::add_table(std::string name, std::shared_ptr<Room> room, at::Tensor shard, bool is_served,
                             int64_t num_rows, const at::Tensor& of_block) {
  auto range = std::dynamic_pointer_cast<AddressRange>(room);
  RowOwners owners(num_rows, peers_->num_holders(), of_block);
  auto added = std::make_unique<ShardedBucket>();
  added->name = std::move(name);
  added->rows = std::make_unique<TableRows>(std::move(owners), room->bytes() / num_rows, std::move(range));
  added->room = std::move(room);
  added->shard = std::move(shard);
  return add(std::move(added), is_served, /*is_filled=*/false);
}

int64_t Residents::add(std::unique_ptr<ShardedBucket> added, bool is_served, bool is_filled) {
  if (is_served) added->served = added->room->served(added->shard);
  publisher_.announce(*added, is_filled);
  const BucketCopies::Lock lock(copies_.mutex);
  const int64_t index = copies_.size(lock);
  added->index = index;
  added->room->set_index(index);
  copies_.add(std::move(added), Copy::State::released, lock);
  return index;
}

ShardPlace Residents::place(int64_t bucket) const {
  const ShardedBucket& sharded = copies_[bucket];
  const void* shard = sharded.served.defined() ? sharded.served.const_data_ptr() : nullptr;
  return {reinterpret_cast<uint64_t>(shard), reinterpret_cast<uint64_t>(&sharded.stamps)};
}

void Residents::set_limit(size_t bytes) {
  const BucketCopies::Lock lock(copies_.mutex);
  copies_.cache(lock).set_limit(bytes);
}

void Residents::release_all() {
  turns_.await_ahead();
  const BucketCopies::Lock lock(copies_.mutex);
  for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) copies_.release_if_free(bucket, lock);
}

// ---- step()

void Residents::begin_update() {
  copies_.check_process();
  turns_.begin_update();
  publisher_.begin_update();
  try {
    publisher_.await_pulls();  // the others' will be written too
  } catch (...) {
    end_update(/*is_update=*/false, /*any_written=*/false);
    throw;
  }
}

void Residents::end_update(bool is_update, bool any_written) {
  if (!turns_.is_updating()) return;
  if (is_update) {
    readers_.forget_calls();
    publisher_.end_update(any_written);
  }
  turns_.end_update();
}

void Residents::stand_by(bool does) {
  copies_.check_process();
  publisher_.stand_by(does);
}

std::vector<int64_t> Residents::take_back() {
  copies_.check_process();
  std::vector<int64_t> differing;
  const std::vector<int64_t> written = publisher_.kept(Stays::here_only);
  std::vector<uint64_t> digests;
  for (const int64_t bucket : written) {
    copies_.begin_use(bucket);
    digests.push_back(copies_[bucket].room->digest());
  }
  publisher_.let_kept_go(Stays::here_only);
  for (size_t i = 0; i < written.size(); ++i) {
    readers_.pin(written[i], nullptr);
    copies_.begin_use(written[i]);
    if (copies_[written[i]].room->digest() != digests[i]) differing.push_back(written[i]);
    const BucketCopies::Lock lock(copies_.mutex);
    copies_[written[i]].room->end_use();
    copies_.uses(lock).unpin(written[i]);
    if (copies_.is_hostile()) copies_.release_if_free(written[i], lock);
    if (!copies_.uses(lock).is_pinned(written[i])) copies_[written[i]].room->let_ask(false);
  }
  return differing;
}

void Residents::come() {
  copies_.check_process();
  publisher_.come();
}

// ---- whole()

void Residents::enter_whole() {
  copies_.check_process();
  int64_t count = 0;
  bool is_first = false;
  {
    const BucketCopies::Lock lock(copies_.mutex);
    is_first = copies_.uses(lock).enter_whole();
    count = copies_.size(lock);
  }
  for (int64_t bucket = 0; bucket < count; ++bucket) readers_.pin(bucket, nullptr);
  {
    const BucketCopies::Lock lock(copies_.mutex);
    for (int64_t bucket = 0; bucket < count; ++bucket) {
      copies_[bucket].room->begin_use();
      if (is_first) copies_[bucket].room->let_write(true);
    }
  }
  if (is_first) publisher_.note_digests();
}

void Residents::leave_whole() {
  const BucketCopies::Lock lock(copies_.mutex);
  Uses& uses = copies_.uses(lock);
  uses.leave_whole();
  for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) {
    Room& room = *copies_[bucket].room;
    const Copy& copy = copies_.cache(lock)[bucket];
    room.end_use();
    uses.unpin(bucket);
    if (copy.state == Copy::State::resident) copies_.forbid_writes(bucket, lock);
    if (!uses.is_pinned(bucket)) room.let_ask(false);
    if (copy.is_outdated()) copies_.release_if_free(bucket, lock);
  }
  copies_.make_space(0, nullptr, lock);
}

void Residents::refresh_whole() {
  enter_whole();
  leave_whole();
  publisher_.note_digests();
}

// ---- what they say of themselves

std::string Residents::failure() {
  const BucketCopies::Lock lock(copies_.mutex);
  return copies_.report(lock).failure();
}

std::string Residents::take_failure() {
  const BucketCopies::Lock lock(copies_.mutex);
  return copies_.report(lock).take_failure();
}

ResidentCounts Residents::counts() {
  const BucketCopies::Lock lock(copies_.mutex);
  return copies_.report(lock).counts();
}

void Residents::record(bool on) {
  const BucketCopies::Lock lock(copies_.mutex);
  copies_.report(lock).log().set_recording(on);
}

std::vector<ResidencyEvent> Residents::take_events() {
  const BucketCopies::Lock lock(copies_.mutex);
  return copies_.report(lock).log().take();
}

size_t Residents::resident_bytes() {
  const BucketCopies::Lock lock(copies_.mutex);
  return copies_.cache(lock).resident_bytes();
}

size_t Residents::take_most_bytes() {
  const BucketCopies::Lock lock(copies_.mutex);
  return copies_.cache(lock).take_most_bytes();
}

size_t Residents::served_bytes() const {
  const BucketCopies::Lock lock(copies_.mutex);
  size_t bytes = 0;
  for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) {
    const ShardedBucket& sharded = copies_[bucket];
    if (sharded.served.defined() && !sharded.served.is_same(sharded.shard)) bytes += sharded.served.nbytes();
  }
  return bytes;
}

std::vector<bool> Residents::resident() {
  const BucketCopies::Lock lock(copies_.mutex);
  std::vector<bool> found;
  for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) {
    found.push_back(copies_.cache(lock)[bucket].state == Copy::State::resident);
  }
  return found;
}

// ---- the end

void Residents::stop_reading() {
  if (copies_.is_in_child()) return;
  turns_.end();
  std::vector<std::shared_ptr<Room>> rooms;
  {
    const BucketCopies::Lock lock(copies_.mutex);
    for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) rooms.push_back(copies_[bucket].room);
  }
  for (const auto& room : rooms) {
    if (room != nullptr) room->await_arrival();  // shards are about to be freed, others' too
  }
  {
    std::vector<at::Tensor> mapped;  // destroyed without the lock: tensors that Python knows need the GIL for it
    const BucketCopies::Lock lock(copies_.mutex);
    for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) {
      for (ShardPlace& place : copies_[bucket].places) mapped.push_back(std::exchange(place.mapped, {}));
    }
  }
  publisher_.say_left();
  reader_.reset();
}

// Parameters that are there keep them.
void Residents::let_rooms_go() {
  readers_.forget_addresses();
  std::vector<std::shared_ptr<Room>> gone;  // destroyed without the lock
  const BucketCopies::Lock lock(copies_.mutex);
  for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) {
    gone.push_back(std::exchange(copies_[bucket].room, {}));
    if (copies_[bucket].rows != nullptr) copies_[bucket].rows->let_go();
  }
}

void Residents::keep_for_others(const std::shared_ptr<Residents>& gone) {
  static auto* const kept = new std::vector<std::shared_ptr<Residents>>();  // leaked, with its lock
  static auto* const mutex = new Mutex<LockRank::gone_residents>;
  Lease::end_late();
  if (gone != nullptr) gone->readers_.stop();
  if (gone != nullptr && !gone->copies_.is_in_child()) gone->let_rooms_go();
  std::vector<std::shared_ptr<Residents>> over;  // destroyed without the lock
  const std::lock_guard lock(*mutex);
  if (gone != nullptr) kept->push_back(gone);
  for (auto& each : *kept) {
    // In a child nothing is destroyed.
    if (!each->copies_.is_in_child() && !each->publisher_.is_read_by_others()) over.push_back(std::exchange(each, {}));
  }
  std::erase(*kept, nullptr);
}

}  // namespace zx
