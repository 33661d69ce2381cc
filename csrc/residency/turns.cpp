#include "residency/turns.h"

#include <chrono>
#include <utility>
#include <vector>

#include "params/read_guard.h"
#include "workers/ranges.h"

namespace zx {

// ---- whose turn it is

// What step() is about to write is fetched when it is written, unless step() itself reads it before. And a copy that is
// out of date is not made new while another thread reads it; but a thread that is inside a reader itself can't wait for
// its end, and reads what the outer one does.
bool Turns::has_come(int64_t bucket, BucketCopies::Locked lock) const {
  const Cache& cache = copies_.cache(lock);
  const Copy& copy = cache[bucket];
  const bool is_released = copy.state == Copy::State::released;
  if (copy.state == Copy::State::arriving) return false;
  // What comes ahead is pinned until it is there, and makes room then.
  if (is_one_ahead_ && is_released && !cache.fits_beside_pinned(copy.bytes)) return false;
  const Uses& uses = copies_.uses(lock);
  const bool may_write = is_released || !uses.is_read(bucket) || uses.is_used_here(bucket);
  return copy.is_up_to_date() || (may_read_shards() && may_write);
}

bool Turns::has_come_for_rows(int64_t bucket, BucketCopies::Locked lock) const {
  const Copy& copy = copies_.cache(lock)[bucket];
  const bool has_pages = copies_[bucket].rows->has_pages();
  const bool may_write = has_pages || copy.state == Copy::State::resident || !copies_.uses(lock).is_read(bucket);
  return copy.state != Copy::State::arriving && (copy.is_up_to_date() || (may_read_shards() && may_write));
}

Turns::Turn Turns::begin(int64_t bucket, const char* reader, BucketCopies::Locked lock) {
  Cache& cache = copies_.cache(lock);
  Copy& copy = cache[bucket];
  const bool has_memory = copy.state == Copy::State::resident;
  if (copies_.is_over(lock)) return {};  // nobody reads it whom it has to be brought for
  if (copy.is_up_to_date() || (has_memory && copies_.uses(lock).is_read_by_another(bucket))) return {};
  const bool has_own = has_memory && !copy.is_old;
  const ShardedBucket& sharded = copies_[bucket];
  if (!has_memory) {
    const size_t more = copy.bytes - copy.held;
    copies_.make_space(more, sharded.rows == nullptr ? reader : nullptr, lock);  // of a table Lookups tells
    cache.hold(bucket, more);
    if (sharded.rows != nullptr) sharded.rows->forget();  // as those that alone are here
  }
  copy.is_stale = copy.is_old = false;
  copies_.report(lock).counts().fetched_bytes += static_cast<int64_t>(copy.bytes - sharded.shard.nbytes());
  Turn turn = begin_fetch(bucket, lock);
  turn.wanted.memory_too = !has_memory;
  turn.wanted.own_too = !has_own;
  return turn;
}

Turns::Turn Turns::begin_fetch(int64_t bucket, BucketCopies::Locked lock) {
  copies_.cache(lock)[bucket].state = Copy::State::arriving;
  ++num_fetching_;
  ++copies_.report(lock).counts().fetches;
  copies_.note(ResidencyEvent::Kind::fetch, bucket, lock);
  // Not what is written: what this rank alone writes nobody stores.
  const int64_t stored = copies_[bucket].stamps.get(ShardStamp::stored);
  const Wanted wanted{.version = publisher_.version(lock), .written = stored};
  return {.is_needed = true, .is_in_update = is_updating_, .wanted = wanted};
}

// It has arrived, or has not.
void Turns::end_fetch(int64_t bucket, const std::string& failure, BucketCopies::Locked lock) {
  --num_fetching_;
  copies_.report(lock).fail(failure);
  copies_.note(ResidencyEvent::Kind::arrive, bucket, lock);
  copies_.changed.notify_all();
}

// ---- what readers wait for

std::string Turns::bring(int64_t bucket, const char* reader) {
  Turn turn;
  {
    BucketCopies::Lock lock(copies_.mutex);
    copies_.uses(lock).begin_wait(bucket);
    {
      const Range range("fetch_wait", bucket);
      copies_.changed.wait(lock, [&] { return has_come(bucket, lock); });
    }
    copies_.uses(lock).end_wait(bucket);
    turn = begin(bucket, reader, lock);
  }
  return finish(bucket, turn);
}

std::optional<Turns::Turn> Turns::begin_at_once(int64_t bucket, const char* reader, BucketCopies::Locked lock) {
  const Copy& copy = copies_.cache(lock)[bucket];
  if (copy.state == Copy::State::arriving || is_updating_ || copy.is_outdated()) return std::nullopt;
  const Range range("fetch_wait", bucket);
  copies_.uses(lock).begin_wait(bucket);
  const bool comes = has_come(bucket, lock);
  copies_.uses(lock).end_wait(bucket);
  return comes ? std::optional(begin(bucket, reader, lock)) : std::nullopt;
}

std::string Turns::finish(int64_t bucket, const Turn& turn) {
  if (!turn.is_needed) return "";
  const ShardedBucket& sharded = copies_[bucket];
  const std::string failure = fetcher_.fetch(sharded, turn.wanted);
  if (turn.is_in_update) sharded.room->await_pulls();  // step() reads this itself, and goes on to a sync point
  const BucketCopies::Lock lock(copies_.mutex);
  if (turn.is_ahead) is_one_ahead_ = false;
  end_fetch(bucket, failure, lock);
  Copy& copy = copies_.cache(lock)[bucket];
  copy.state = Copy::State::resident;
  copy.is_old = !failure.empty();
  copies_.forbid_writes(bucket, lock);
  return failure;
}

std::string Turns::bring_rows(int64_t bucket, const at::Tensor& indices, const char* reader) {
  const ShardedBucket& sharded = copies_[bucket];
  TableRows& rows = *sharded.rows;
  std::vector<int64_t> missing;
  Turn turn;
  bool is_read_whole = false;
  {
    BucketCopies::Lock lock(copies_.mutex);
    copies_.uses(lock).begin_wait(bucket);
    copies_.changed.wait(lock, [&] { return has_come_for_rows(bucket, lock); });
    copies_.uses(lock).end_wait(bucket);
    const Copy& copy = copies_.cache(lock)[bucket];
    if (copy.is_up_to_date() || copies_.is_over(lock)) return "";
    is_read_whole = copy.state == Copy::State::resident && copies_.uses(lock).is_used_by_another(bucket);
    if (!is_read_whole) {
      if (copy.state == Copy::State::resident) copies_.release(bucket, lock);  // an old copy
      missing = rows.missing(indices);
      if (rows.may_run(missing)) {
        sharded.room->let_write(false);
        return "";
      }
      copies_.make_space(rows.more_bytes(missing), nullptr, lock);
      turn = begin_fetch(bucket, lock);
    }
  }
  if (is_read_whole) return bring(bucket, reader);
  const std::string failure = fetcher_.fetch_rows(sharded, missing, turn.wanted);
  const BucketCopies::Lock lock(copies_.mutex);
  copies_.cache(lock)[bucket].state = Copy::State::released;
  copies_.cache(lock).hold(bucket, rows.note(failure.empty() ? missing : std::vector<int64_t>()));
  if (failure.empty()) copies_.report(lock).counts().fetched_bytes += fetcher_.bytes_of_others(sharded, missing);
  end_fetch(bucket, failure, lock);
  sharded.room->let_write(false);
  return failure;
}

std::string Turns::await(int64_t bucket, const std::function<std::string()>& brought) {
  {
    const BucketCopies::Lock lock(copies_.mutex);
    copies_.note(ResidencyEvent::Kind::wait, bucket, lock);
    ++copies_.report(lock).counts().waits;
  }
  std::string failure;
  const auto start = std::chrono::steady_clock::now();
  ReadGuard::without_gil([&] {
    failure = brought();
    const BucketCopies::Lock lock(copies_.mutex);
    copies_.note(ResidencyEvent::Kind::go_on, bucket, lock);
    const auto waited = std::chrono::steady_clock::now() - start;
    copies_.report(lock).counts().waited_ns += waited / std::chrono::nanoseconds(1);
  });
  return failure;
}

// ---- what comes ahead

void Turns::look_ahead(BucketCopies::Locked lock) {
  const bool takes_long = asks_others_ || copies_.on_accelerator();
  if (!takes_long || is_looking_ahead_ || copies_.is_over(lock)) return;
  is_looking_ahead_ = true;
  worker_.post([this] { fetch_ahead(); });
}

void Turns::end_looking(BucketCopies::Locked /*lock*/) {
  is_looking_ahead_ = false;
  copies_.changed.notify_all();
}

std::optional<Turns::Ahead> Turns::begin_ahead() {
  const BucketCopies::Lock lock(copies_.mutex);
  Uses& uses = copies_.uses(lock);
  const bool is_time = !is_updating_ && !uses.is_whole() && !copies_.is_over(lock);
  const bool is_well = copies_.report(lock).failure().empty();
  const int64_t next = is_time && is_well ? copies_.cache(lock).next_to_fetch_ahead() : -1;
  if (next < 0) {
    end_looking(lock);
    return std::nullopt;
  }
  const Range range("fetch_wait", next);
  uses.pin(next);
  ++copies_.report(lock).counts().prefetches;
  Turn turn = begin(next, nullptr, lock);
  turn.is_ahead = is_one_ahead_ = true;
  return Ahead{next, std::move(turn)};
}

void Turns::fetch_ahead() {
  const ReadGuard::Pause pause;
  while (const std::optional<Ahead> next = begin_ahead()) {
    const bool arrived = finish(next->bucket, next->turn).empty();
    const BucketCopies::Lock lock(copies_.mutex);
    copies_.uses(lock).unpin(next->bucket);
    if (!copies_.uses(lock).is_pinned(next->bucket)) copies_[next->bucket].room->let_ask(false);
    copies_.changed.notify_all();
    if (arrived) continue;
    end_looking(lock);
    return;
  }
}

// ---- step()

void Turns::begin_update() {
  BucketCopies::Lock lock(copies_.mutex);
  is_updating_ = true;
  updater_ = std::this_thread::get_id();
  copies_.changed.wait(lock, [this] { return num_fetching_ == 0; });
}

bool Turns::is_updating() const {
  const BucketCopies::Lock lock(copies_.mutex);
  return is_updating_;
}

void Turns::await_ahead() {
  BucketCopies::Lock lock(copies_.mutex);
  copies_.changed.wait(lock, [this] { return !is_looking_ahead_; });
}

void Turns::await_ahead(int64_t bucket) {
  BucketCopies::Lock lock(copies_.mutex);
  copies_.changed.wait(lock, [&] { return !is_looking_ahead_ || !copies_.uses(lock).is_pinned(bucket); });
}

void Turns::end() {
  BucketCopies::Lock lock(copies_.mutex);
  copies_.end(lock);
  copies_.changed.wait(lock, [this] { return num_fetching_ == 0 && !is_looking_ahead_; });
}

void Turns::end_update() {
  const BucketCopies::Lock lock(copies_.mutex);
  is_updating_ = false;
  copies_.changed.notify_all();
}

}  // namespace zx
