#include "residency/residents.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "buckets/address.h"
#include "residency/device_room.h"
#include "torch_internals.h"
#include "workers/ranges.h"

namespace zx {
namespace {

// What the operators have pinned that this thread is in.
thread_local std::vector<std::pair<const Residents*, int64_t>> pinned_here;

void unpin_here(const Residents* residents, int64_t bucket) {
  const auto found = std::find(pinned_here.rbegin(), pinned_here.rend(), std::pair(residents, bucket));
  if (found != pinned_here.rend()) pinned_here.erase(std::next(found).base());
}

bool is_pinned_here(const Residents* residents, int64_t bucket) {
  return std::find(pinned_here.begin(), pinned_here.end(), std::pair(residents, bucket)) != pinned_here.end();
}

}  // namespace

Residents::Residents(std::shared_ptr<const PeerShards> peers, HiddenReads hidden)
    : peers_(std::move(peers)), rooms_(hidden) {
  snapshots_.push_back(std::make_unique<const std::vector<ByAddress>>());
  by_address_ = snapshots_.back().get();
}

Residents::~Residents() { remove_fault_reader(this); }

std::shared_ptr<Room> Residents::make_room(size_t bytes, c10::Device device) {
  const std::lock_guard lock(mutex_);
  return rooms_.make(bytes, device);
}

std::shared_ptr<Room> Residents::make_table_room(size_t bytes, c10::Device device) {
  const std::lock_guard lock(mutex_);
  return rooms_.make_for_table(bytes, device);
}

int64_t Residents::add_table(std::string name, std::shared_ptr<Room> room, at::Tensor shard, bool is_served,
                             int64_t num_rows, const at::Tensor& of_block) {
  auto range = std::dynamic_pointer_cast<AddressRange>(room);
  RowOwners owners(num_rows, peers_->num_holders(), of_block);
  auto rows = std::make_unique<TableRows>(std::move(owners), room->bytes() / num_rows, std::move(range));
  const int64_t index = add(std::move(name), std::move(room), std::move(shard), is_served);
  const std::lock_guard lock(mutex_);
  buckets_[index]->rows = std::move(rows);
  return index;
}

int64_t Residents::add(std::string name, std::shared_ptr<Room> room, at::Tensor shard, bool is_served) {
  const std::lock_guard lock(mutex_);
  auto sharded = std::make_unique<ShardedBucket>();
  sharded->index = static_cast<int64_t>(buckets_.size());
  sharded->name = std::move(name);
  sharded->room = std::move(room);
  sharded->room->set_index(sharded->index);
  sharded->room->end_use();  // it was filled
  sharded->shard = std::move(shard);
  if (is_served) sharded->served = sharded->room->served(sharded->shard);
  sharded->room->serve(sharded->shard, sharded->served, {});
  sharded->version = now_.version;
  sharded->stamps.at(ShardStamp::version) = now_.version;
  sharded->touched = ++now_.clock;
  sharded->pins = now_.whole;
  hold(*sharded, sharded->room->bytes());
  sharded->address = sharded->shard.const_data_ptr();
  peers_->add(sharded->served, sharded->stamps);
  buckets_.push_back(std::move(sharded));
  return buckets_.back()->index;
}

// Readers look without a lock. They may still look at an old snapshot, so all are kept.
void Residents::watch_added() {
  std::unique_lock lock(mutex_);
  auto next = std::make_unique<std::vector<ByAddress>>();
  for (const auto& sharded : buckets_) {
    const auto* range = dynamic_cast<const AddressRange*>(sharded->room.get());
    if (range != nullptr) next->push_back({range->data(), range->data() + range->bytes(), sharded->index});
  }
  std::sort(next->begin(), next->end(), [](const auto& a, const auto& b) { return a.start < b.start; });
  const bool faults = !next->empty() && rooms_.hidden_reads_fault();
  snapshots_.push_back(std::move(next));
  by_address_ = snapshots_.back().get();
  lock.unlock();
  if (faults) add_fault_reader(this);
}

ShardPlace Residents::place(int64_t bucket) const {
  const std::lock_guard lock(mutex_);
  const ShardedBucket& sharded = *buckets_.at(bucket);
  const void* shard = sharded.served.defined() ? sharded.served.const_data_ptr() : nullptr;
  return {reinterpret_cast<uint64_t>(shard), reinterpret_cast<uint64_t>(&sharded.stamps)};
}

void Residents::set_places(int64_t bucket, std::vector<ShardPlace> by_rank) {
  const std::lock_guard lock(mutex_);
  buckets_.at(bucket)->places = std::move(by_rank);
  ShardedBucket& sharded = *buckets_.at(bucket);
  if (now_.whole == 0) sharded.room->let_write(false);
  sharded.digest = now_.whole == 0 ? 0 : sharded.room->digest();
  if (sharded.rows != nullptr && may_be_released(sharded)) release(sharded);  // lookups come first
  if (sharded.pins == 0) sharded.room->let_ask(false);
  evict_for(0, nullptr);
}

void Residents::set_limit(size_t bytes) {
  const std::lock_guard lock(mutex_);
  now_.limit = bytes;
}

// The bucket that the address is in, or -1. This is asked for each argument of each operator.
int64_t Residents::bucket_at(const void* address) const {
  const auto* place = static_cast<const char*>(address);
  const auto& all = *by_address_.load(std::memory_order_acquire);
  const auto after = std::upper_bound(all.begin(), all.end(), place,
                                      [](const char* address, const auto& each) { return address < each.start; });
  if (after == all.begin()) return -1;
  const ByAddress& found = *std::prev(after);
  return place < found.stop ? found.bucket : -1;
}

// The bucket that a tensor lies in, or -1.
int64_t Residents::bucket_of(const at::Tensor& tensor) const {
  if (tensor.is_cpu()) return bucket_at(data_ptr_of(tensor).get());
  const auto room = DeviceRoom::of(tensor);
  if (room == nullptr) return -1;
  const std::lock_guard lock(mutex_);
  const int64_t index = room->index();
  const bool is_ours = index >= 0 && index < static_cast<int64_t>(buckets_.size()) && buckets_[index]->room == room;
  return is_ours ? index : -1;
}

// ---- reads

void Residents::before_read(const at::Tensor& tensor, const ReadGuard::Use& use) {
  const int64_t bucket = bucket_of(tensor);
  if (bucket < 0 || std::strcmp(use.name(), internals::kSetsData) == 0) return;
  if (buckets_[bucket]->rows != nullptr && before_lookup(bucket, tensor, use)) return;
  pin_here(bucket, use.name());
  const bool is_collective = internals::begins_with(use.name(), internals::kCollective);
  if (use.pin(bucket, tensor, /*to_read=*/is_collective)) let_write(bucket);
  if (is_collective) refuse_collective(*buckets_[bucket]);
}

void Residents::before_hidden_reads(const char* reader, ReadGuard::Pins& pins) {
  if (rooms_.hidden_reads_fault()) return;
  size_t count = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!now_.forgotten) count = buckets_.size();
  }
  for (size_t bucket = 0; bucket < count; ++bucket) pin_for(static_cast<int64_t>(bucket), reader, pins);
}

// For an operator that this thread is in, on its current stream. A bucket without a room: the optimizer was deleted.
void Residents::pin_here(int64_t bucket, const char* reader) {
  pin(bucket, reader);
  pinned_here.emplace_back(this, bucket);
  begin_use(*buckets_[bucket]);
}

void Residents::begin_use(ShardedBucket& sharded) {
  if (!rooms_.on_accelerator()) return;
  const std::lock_guard lock(mutex_);
  if (sharded.room != nullptr) sharded.room->begin_use();
}

void Residents::before_function(const ReadGuard::PythonFunction& function, const ReadGuard::Pins& reads) {
  if (!process_.is_this()) return;
  std::vector<int64_t> buckets;
  for (const auto& pin : reads) buckets.push_back(pin.what);
  std::sort(buckets.begin(), buckets.end());
  buckets.erase(std::unique(buckets.begin(), buckets.end()), buckets.end());
  const std::lock_guard lock(mutex_);
  past_.functions.note(function.name, {function.thread, function.number}, std::move(buckets));
}

void Residents::before_backward_of(const ReadGuard::PythonFunction& function, ReadGuard::Pins& pins) {
  std::vector<int64_t> buckets;
  if (process_.is_this()) {
    const std::lock_guard lock(mutex_);
    buckets = past_.functions.read_by(function.name, {function.thread, function.number});
  }
  for (const int64_t bucket : buckets) pin_for(bucket, function.name.c_str(), pins);
}

// For a reader that does not say whether it writes.
void Residents::pin_for(int64_t bucket, const char* reader, ReadGuard::Pins& pins) {
  pin_here(bucket, reader);
  pins.push_back({.what = bucket});
}

void Residents::pin(int64_t bucket, const char* reader) {
  if (!process_.is_this()) {
    in_child(*buckets_[bucket]);
    return;
  }
  std::unique_lock lock(mutex_);
  ShardedBucket& sharded = *buckets_[bucket];
  ++sharded.pins;
  if (sharded.room != nullptr) sharded.room->let_ask(true);
  sharded.touched = ++now_.clock;
  if (reader != nullptr && sharded.rows == nullptr && past_.script.note(bucket)) look_ahead();
  if (is_up_to_date(sharded)) return;
  const std::string failure = wait_for(sharded, lock, [&] { return fetch_now(sharded, lock, reader); });
  if (!failure.empty() && reader != nullptr) ReadGuard::raise_soon(failure);
}

// Called under the lock, which it unlocks; `fetch` is called under it, without the GIL, and returns an error or
// nothing.
std::string Residents::wait_for(const ShardedBucket& sharded, std::unique_lock<std::mutex>& lock,
                                const std::function<std::string()>& fetch) {
  past_.log.note(ResidencyEvent::Kind::wait, sharded.index, now_.resident_bytes);
  ++now_.counts.waits;
  lock.unlock();
  std::string failure;
  const auto start = std::chrono::steady_clock::now();
  ReadGuard::without_gil([&] {
    lock.lock();
    failure = fetch();
    past_.log.note(ResidencyEvent::Kind::go_on, sharded.index, now_.resident_bytes);
    now_.counts.waited_ns += (std::chrono::steady_clock::now() - start) / std::chrono::nanoseconds(1);
    lock.unlock();
  });
  return failure;
}

void Residents::let_write(int64_t bucket) {
  if (!process_.is_this()) return;
  const std::lock_guard lock(mutex_);
  ShardedBucket& sharded = *buckets_[bucket];
  if (sharded.writers++ == 0 && now_.whole == 0) sharded.room->let_write(true);
}

// Called under the lock, by a thread that has pinned the bucket. Returns when it is resident: the error, if it has not
// arrived. (Raising it needs the GIL, for which no lock may be held, and nobody may be waiting for this thread.)
std::string Residents::fetch_now(ShardedBucket& sharded, std::unique_lock<std::mutex>& lock, const char* reader,
                                 bool ahead) {
  const bool is_inside = is_pinned_here(this, sharded.index);
  ++sharded.waiting;
  // What step() is about to write is fetched when it is written, unless step() itself reads it before. And a copy that
  // is out of date is not made new while another thread reads it; but a thread that is inside a reader itself can't
  // wait for its end, and reads what the outer one does.
  {
    const Range range("fetch_wait", sharded.index);
    changed_.wait(lock, [&] {
      if (sharded.state == State::arriving) return false;
      // What comes ahead is pinned until it is there, and makes room then.
      if (ahead_.is_arriving && sharded.state == State::released && !fits_beside_pinned(sharded.room->bytes())) {
        return false;
      }
      const bool may_read = !now_.updating || now_.updater == std::this_thread::get_id();
      const bool may_write = sharded.state == State::released || !is_read_now(sharded) || is_inside;
      return is_up_to_date(sharded) || (may_read && may_write);
    });
  }
  --sharded.waiting;
  const bool has_memory = sharded.state == State::resident;
  if (is_up_to_date(sharded) || (has_memory && sharded.pins - sharded.waiting > now_.whole + 1)) return "";
  const bool has_own = has_memory && !sharded.is_old;
  if (!has_memory) {
    const size_t more = sharded.room->bytes() - sharded.held;
    evict_for(more, sharded.rows == nullptr ? reader : nullptr);  // of a table warn_of_whole() tells
    hold(sharded, more);
    if (sharded.rows != nullptr) sharded.rows->forget();  // as those that alone are here
  }
  sharded.state = State::arriving;
  ahead_.is_arriving = ahead_.is_arriving || ahead;
  sharded.is_stale = sharded.is_old = false;
  sharded.version = now_.version;
  ++now_.num_fetching;
  ++now_.counts.fetches;
  now_.counts.fetched_bytes += static_cast<int64_t>(sharded.room->bytes() - sharded.shard.nbytes());
  past_.log.note(ResidencyEvent::Kind::fetch, sharded.index, now_.resident_bytes);
  const bool updating = now_.updating;
  lock.unlock();
  const std::string failure = fetch(sharded, /*memory_too=*/!has_memory, /*own_too=*/!has_own);
  if (updating) sharded.room->await_pulls();  // step() reads this itself, and goes on to a sync point
  lock.lock();
  if (now_.failure.empty()) now_.failure = failure;
  --now_.num_fetching;
  if (ahead) ahead_.is_arriving = false;
  past_.log.note(ResidencyEvent::Kind::arrive, sharded.index, now_.resident_bytes);
  sharded.state = State::resident;
  sharded.is_old = !failure.empty();
  if (sharded.writers == 0 && now_.whole == 0) sharded.room->let_write(false);
  changed_.notify_all();
  return failure;
}

std::string Residents::failure() const {
  const std::lock_guard lock(mutex_);
  return now_.failure;
}

std::string Residents::take_failure() {
  const std::lock_guard lock(mutex_);
  return std::exchange(now_.failure, {});
}

// ---- the end of an operator

void Residents::after_operator(const ReadGuard::Pins& pins) {
  if (!process_.is_this()) return;
  std::vector<int64_t> written;
  for (const auto& pin : pins) {
    if (pin.was_written) written.push_back(pin.what);
  }
  std::sort(written.begin(), written.end());
  written.erase(std::unique(written.begin(), written.end()), written.end());
  if (!written.empty()) take_over(written);
  for (const auto& pin : pins) unpin_here(this, pin.what);
  const std::lock_guard lock(mutex_);
  for (const auto& pin : pins) {
    if (pin.what < 0) {
      end_lookup(~pin.what);
      continue;
    }
    ShardedBucket& sharded = *buckets_[pin.what];
    if (sharded.room != nullptr) sharded.room->end_use();
    --sharded.pins;
    if (pin.may_write && --sharded.writers == 0 && now_.whole == 0 && !now_.forgotten &&
        sharded.state == State::resident) {
      sharded.room->let_write(false);
    }
    if (sharded.is_stale || sharded.is_old) changed_.notify_all();
    if (hostile_ && may_be_released(sharded)) release(sharded);
    if (sharded.pins == 0 && sharded.room != nullptr) sharded.room->let_ask(false);
  }
  if (now_.resident_bytes > now_.limit) evict_for(0, nullptr);
}

}  // namespace zx
