// What lookups read of tables: see Note [Rows are fetched by lookups].
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "check.h"
#include "residency/device_room.h"
#include "residency/residents.h"
#include "residency/unseen.h"
#include "torch_internals.h"
#include "workers/ranges.h"

namespace zx {
namespace {

// The tables that this thread is looking up rows of: what the operator calls reads no others.
thread_local std::vector<std::pair<const Residents*, int64_t>> looked_up_here;

// The host waits for the device here: which rows are to be fetched hangs on them. Undefined if it could not: the caller
// of the lookup raises then.
at::Tensor on_host(const at::Tensor& indices) {
  if (indices.is_cpu()) return indices;
  at::Tensor copied;
  std::string failure;
  ReadGuard::without_gil([&] {
    try {
      const Unseen unseen;
      copied = indices.to(at::kCPU);
    } catch (const std::exception& error) {
      failure = reason_of(error);
    }
  });
  if (!failure.empty()) ReadGuard::raise_soon("zerox: which rows are looked up was not to be had: " + failure);
  return copied;
}

}  // namespace

// Returns whether that is all that is to be done for it.
bool Residents::before_lookup(int64_t bucket, const at::Tensor& tensor, const ReadGuard::Use& use) {
  const auto here = std::pair<const Residents*, int64_t>(this, bucket);
  if (std::find(looked_up_here.begin(), looked_up_here.end(), here) != looked_up_here.end()) return true;
  if (use.is_view() || internals::reads_no_value(use.name())) return true;
  ShardedBucket& sharded = *buckets_[bucket];
  if (std::strcmp(use.name(), internals::kRenorm) == 0) {
    ReadGuard::raise_soon("zerox: max_norm= of an embedding writes " + sharded.name +
                          " in each forward, which is sharded by rows (stage=3): make the module without max_norm, or "
                          "train in stage=2");
  }
  const at::Tensor* indices = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (sharded.room == nullptr) return true;  // the optimizer was deleted, and all is whole
    indices = looked_up(use, tensor, *sharded.room, sharded.rows->row_bytes());
  }
  if (indices == nullptr) {
    if (!use.is_write(/*if_unknown=*/false)) warn_of_whole(sharded, use.name());
    return false;
  }
  if (!process_.is_this()) {
    in_child(sharded);
    return true;
  }
  const at::Tensor known = on_host(*indices);
  if (!known.defined()) return true;
  pin_rows(sharded, known, use.name());
  begin_use(sharded);
  looked_up_here.push_back(here);
  use.pin(~bucket, tensor, /*to_read=*/true);
  return true;
}

void Residents::warn_of_whole(ShardedBucket& sharded, const char* reader) {
  {
    const std::lock_guard lock(mutex_);
    const bool is_fetched = !is_up_to_date(sharded) && now_.whole == 0 && !now_.forgotten && process_.is_this();
    if (!is_fetched || sharded.rows->has_warned()) return;
  }
  TORCH_WARN("zerox: ", reader, " reads ", sharded.name, ", which is sharded by rows, and is no lookup of ",
             "nn.Embedding or nn.EmbeddingBag: so all of it is fetched, ",
             static_cast<double>(sharded.room->bytes()) / (1 << 20), " MiB. Nothing is wrong but what that takes. ",
             "This is said once of each table");
}

// What the lookup names is here, and may be read, until end_lookup().
void Residents::pin_rows(ShardedBucket& sharded, const at::Tensor& indices, const char* reader) {
  std::unique_lock lock(mutex_);
  ++sharded.pins;
  sharded.rows->begin_lookup();
  if (sharded.room != nullptr) sharded.room->let_ask(true);
  sharded.touched = ++now_.clock;
  if (is_up_to_date(sharded)) return;
  if (sharded.state == State::released && sharded.rows->may_run(sharded.rows->missing(indices))) {
    sharded.room->let_write(false);
    return;
  }
  const std::string failure = wait_for(sharded, lock, [&] { return fetch_rows_now(sharded, indices, lock, reader); });
  if (!failure.empty()) ReadGuard::raise_soon(failure);
}

// Called under the lock, by a thread that has pinned the table. Returns the error, if rows have not arrived.
std::string Residents::fetch_rows_now(ShardedBucket& sharded, const at::Tensor& indices,
                                      std::unique_lock<std::mutex>& lock, const char* reader) {
  ++sharded.waiting;
  changed_.wait(lock, [&] {
    const bool may_read = !now_.updating || now_.updater == std::this_thread::get_id();
    const bool may_write = sharded.rows->has_pages() || sharded.state == State::resident || !is_read_now(sharded);
    return sharded.state != State::arriving && (is_up_to_date(sharded) || (may_read && may_write));
  });
  --sharded.waiting;
  if (is_up_to_date(sharded)) return "";
  if (sharded.state == State::resident) {  // an old copy
    if (sharded.pins - sharded.waiting > 1) return fetch_now(sharded, lock, reader);
    release(sharded);
  }
  TableRows& rows = *sharded.rows;
  const std::vector<int64_t> missing = rows.missing(indices);
  std::string failure;
  if (!rows.may_run(missing)) {
    evict_for(rows.more_bytes(missing), nullptr);
    sharded.state = State::arriving;
    sharded.version = now_.version;
    ++now_.num_fetching;
    ++now_.counts.fetches;
    past_.log.note(ResidencyEvent::Kind::fetch, sharded.index, now_.resident_bytes);
    lock.unlock();
    failure = fetch_rows(sharded, missing);
    lock.lock();
    --now_.num_fetching;
    sharded.state = State::released;
    hold(sharded, rows.note(failure.empty() ? missing : std::vector<int64_t>()));
    if (failure.empty()) now_.counts.fetched_bytes += rows.bytes_of_others(peers_->rank(), missing);
    if (now_.failure.empty()) now_.failure = failure;
    past_.log.note(ResidencyEvent::Kind::arrive, sharded.index, now_.resident_bytes);
    changed_.notify_all();
  }
  sharded.room->let_write(false);
  return failure;
}

// Without the lock. As fetch(), of these rows.
std::string Residents::fetch_rows(ShardedBucket& sharded, const std::vector<int64_t>& missing) {
  const Range range("fetch", sharded.index);
  const Doing doing([&sharded] { return "a lookup in " + sharded.name; }, /*per_batch=*/true);
  try {
    if (sharded.rows->has_pages()) {
      fetch_into_pages(sharded, missing);
    } else {
      fetch_to_device(sharded, missing);
    }
  } catch (const std::exception& error) {
    if (sharded.rows->has_pages()) {
      sharded.rows->spoil(missing);
    } else {
      sharded.room->spoil(own_shard(sharded));
    }
    return "zerox: rows of " + sharded.name + " did not arrive from all ranks: " + reason_of(error);
  }
  return "";
}

Question Residents::wanted_of(const ShardedBucket& sharded) {
  return {.bucket = sharded.index, .version = sharded.version, .stored = sharded.written, .wants_shard = true};
}

// Each row to its place.
void Residents::fetch_into_pages(ShardedBucket& sharded, const std::vector<int64_t>& missing) {
  TableRows& rows = *sharded.rows;
  sharded.room->let_write(true);
  sharded.room->take_shard(sharded.shard, rows.pieces_of(peers_->rank(), missing));
  check_not_given_up();
  const auto pieces_of = [&](int rank) { return rows.pieces_of(rank, missing); };
  peers_->fetch(wanted_of(sharded), sharded.places, {rows.range().data(), pieces_of, {}, /*in_part=*/true});
}

// What comes through the host's memory is packed there, one owner's rows after the other's.
void Residents::fetch_to_device(ShardedBucket& sharded, const std::vector<int64_t>& missing) {
  auto& room = dynamic_cast<DeviceRoom&>(*sharded.room);
  const size_t row_bytes = sharded.rows->row_bytes();
  const std::vector<RowMoves> moves = sharded.rows->moves_by_owner(peers_->num_holders(), missing);
  room.restore();
  room.take_rows(sharded.shard, moves[peers_->rank()], row_bytes);
  check_not_given_up();
  RowMoves through_host;
  std::vector<std::vector<BytePiece>> pieces(moves.size());  // of each owner's shard, and where they are packed
  for (int rank = 0; rank < peers_->num_holders(); ++rank) {
    if (rank == peers_->rank()) continue;
    const bool is_mapped = sharded.places.at(rank).mapped.defined();
    for (size_t i = 0; i < moves[rank].to.size(); ++i) {
      const size_t packed = through_host.to.size();
      pieces[rank].push_back({moves[rank].from[i] * row_bytes, packed * row_bytes, row_bytes});
      if (is_mapped) continue;
      through_host.from.push_back(static_cast<int64_t>(packed));
      through_host.to.push_back(moves[rank].to[i]);
    }
  }
  const at::Tensor inbox = room.pinned(through_host.to.size() * row_bytes);
  const auto pieces_of = [&](int rank) { return pieces[rank]; };
  const auto pull = [&](int rank, const at::Tensor& mapped) { room.pull_rows(mapped, moves[rank], row_bytes); };
  peers_->fetch(wanted_of(sharded), sharded.places,
                {static_cast<char*>(inbox.mutable_data_ptr()), pieces_of, pull, /*in_part=*/true});
  room.take_rows(inbox, through_host, row_bytes);
}

// Called under the lock.
void Residents::end_lookup(int64_t bucket) {
  const auto found =
      std::find(looked_up_here.rbegin(), looked_up_here.rend(), std::pair<const Residents*, int64_t>(this, bucket));
  if (found != looked_up_here.rend()) looked_up_here.erase(std::next(found).base());
  ShardedBucket& sharded = *buckets_[bucket];
  sharded.rows->end_lookup();
  --sharded.pins;
  if (sharded.room == nullptr) return;
  if (rooms_.on_accelerator()) sharded.room->end_use();
  const bool is_over = sharded.state == State::released && !sharded.rows->is_looked_up();
  if (is_over && sharded.rows->has_pages()) sharded.rows->range().hide();
  if (sharded.is_stale || sharded.is_old || !sharded.rows->has_pages()) changed_.notify_all();
  if (sharded.pins == 0) sharded.room->let_ask(false);
  const bool goes_now = hostile_ || (is_over && !sharded.rows->has_pages());
  if (goes_now && may_be_released(sharded)) release(sharded);
}

// More of its memory is in use. Called under the lock.
void Residents::hold(ShardedBucket& sharded, size_t bytes) {
  sharded.held += bytes;
  now_.resident_bytes += bytes;
  now_.most_bytes = std::max(now_.most_bytes, now_.resident_bytes);
}

}  // namespace zx
