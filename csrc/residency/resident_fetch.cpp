// How a bucket's values come from all ranks' shards: see Note [Shards are pulled].
#include <c10/util/Exception.h>

#include <exception>

#include "check.h"
#include "residency/residents.h"
#include "workers/ranges.h"

namespace zx {

// Where a rank's shard lies in the whole, in order.
std::vector<BytePiece> Residents::shard_of(const ShardedBucket& sharded, int rank) const {
  if (sharded.rows != nullptr) return sharded.rows->shard_of(rank);
  const size_t bytes = sharded.shard.nbytes();
  return bytes == 0 ? std::vector<BytePiece>() : std::vector<BytePiece>{{0, rank * bytes, bytes}};
}

// Where the shards come that are not mapped; those of ranks in a row are one span.
std::vector<Room::ByteSpan> Residents::spans_through_host(const ShardedBucket& sharded) const {
  std::vector<Room::ByteSpan> spans;
  for (int rank = 0; rank < peers_->num_holders(); ++rank) {
    if (rank == peers_->rank() || sharded.places.at(rank).mapped.defined()) continue;
    const size_t bytes = sharded.shard.nbytes();
    const Room::ByteSpan span{rank * bytes, (rank + 1) * bytes};
    if (!spans.empty() && spans.back().stop == span.start) {
      spans.back().stop = span.stop;
    } else {
      spans.push_back(span);
    }
  }
  return spans;
}

// Without the lock. An error leaves NaN behind, so that nobody takes what is there for parameters.
std::string Residents::fetch(ShardedBucket& sharded, bool memory_too, bool own_too) {
  if (sharded.rows != nullptr && !sharded.rows->has_pages()) return fetch_rows(sharded, sharded.rows->all());
  const Range range("fetch", sharded.index);
  const Doing doing([&sharded] { return "a read of the parameters of " + sharded.name; }, /*per_batch=*/true);
  Room& room = *sharded.room;
  try {
    if (memory_too) {
      room.restore();
    } else {
      room.let_write(true);
    }
    if (own_too) room.take_shard(sharded.shard, own_shard(sharded));
    check_not_given_up();
    const auto through_host = spans_through_host(sharded);
    const Room::Inbox inbox = through_host.empty() ? Room::Inbox() : room.inbox();
    const auto pieces_of = [&](int rank) { return shard_of(sharded, rank); };
    const auto pull = [&](int rank, const at::Tensor& mapped) { room.pull(mapped, rank * sharded.shard.nbytes()); };
    peers_->fetch(wanted_of(sharded), sharded.places, {inbox.data, pieces_of, pull});
    if (!through_host.empty()) room.take_in(inbox, through_host);
  } catch (const std::exception& error) {
    room.spoil(own_shard(sharded));
    return "zerox: the parameters of " + sharded.name + " did not arrive from all ranks: " + reason_of(error);
  }
  return "";
}

// Throws if nobody is asked any more, with the reason. Where a rank is gone, the end of the optimizer would else wait
// for it once a bucket.
void Residents::check_not_given_up() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!now_.ending || now_.failure.empty(), now_.failure);
}

// The host waits until the device reads no other rank's memory any more. Without the lock.
void Residents::await_pulls() const {
  std::vector<std::shared_ptr<Room>> rooms;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& sharded : buckets_) rooms.push_back(sharded->room);
  }
  for (const auto& room : rooms) room->await_pulls();
}

}  // namespace zx
