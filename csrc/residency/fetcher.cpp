#include "residency/fetcher.h"

#include <c10/util/Exception.h>

#include <exception>

#include "check.h"
#include "locks.h"
#include "residency/device_room.h"
#include "workers/ranges.h"

namespace zx {
namespace {

// They come when the call that adds a bucket is almost through.
void check_places(const ShardedBucket& sharded) {
  if (sharded.places.empty())
    throw std::runtime_error("the call that adds them to an optimizer is not through, or has raised");
}

Question question_of(const ShardedBucket& sharded, const Wanted& wanted) {
  return {.bucket = sharded.index, .version = wanted.version, .stored = wanted.written, .wants_shard = true};
}

}  // namespace

// ---- buckets

// Where the shards come that are not mapped; those of ranks in a row are one span.
std::vector<Room::ByteSpan> Fetcher::spans_through_host(const ShardedBucket& sharded) const {
  std::vector<Room::ByteSpan> spans;
  for (int rank = 0; rank < peers_->num_holders(); ++rank) {
    if (rank == peers_->rank() || sharded.places.at(rank).mapped.defined()) continue;
    const Room::ByteSpan span{sharded.starts.at(rank), sharded.starts.at(rank + 1)};
    if (!spans.empty() && spans.back().stop == span.start) {
      spans.back().stop = span.stop;
    } else {
      spans.push_back(span);
    }
  }
  return spans;
}

std::string Fetcher::fetch(const ShardedBucket& sharded, const Wanted& wanted) const {
  check_may_wait("other ranks' shards");
  if (sharded.rows != nullptr && !sharded.rows->has_pages()) return fetch_rows(sharded, sharded.rows->all(), wanted);
  const Range range("fetch", sharded.index);
  const Doing doing([&sharded] { return "a read of the parameters of " + sharded.name; }, /*per_batch=*/true);
  std::string failure;
  try {
    check_places(sharded);
    fetch_whole(sharded, wanted);
  } catch (const std::exception& error) {
    sharded.room->spoil(own_shard(sharded));
    failure = "zerox: the parameters of " + sharded.name + " did not arrive from all ranks: " + reason_of(error);
  }
  try {
    sharded.room->end_fetch();
  } catch (const std::exception& error) {
    if (failure.empty()) failure = "zerox: the parameters of " + sharded.name + " can't be read: " + reason_of(error);
  }
  return failure;
}

void Fetcher::fetch_whole(const ShardedBucket& sharded, const Wanted& wanted) const {
  Room& room = *sharded.room;
  if (wanted.memory_too) {
    room.restore();
  } else {
    room.let_write(true);
  }
  if (wanted.own_too) take_own(sharded);
  const bool is_table = sharded.rows != nullptr;  // of which pieces come to the host's memory, where it has its place
  const auto through_host = is_table ? std::vector{Room::ByteSpan{0, room.bytes()}} : spans_through_host(sharded);
  const Room::Inbox inbox = through_host.empty() ? Room::Inbox() : room.inbox();
  const auto pieces_of = [&](int rank) { return sharded.shard_of(rank); };
  const auto pull = [&](int rank, const at::Tensor& mapped) { room.pull(mapped, sharded.starts.at(rank)); };
  peers_->fetch(question_of(sharded, wanted), sharded.places, {inbox.data, pieces_of, pull});
  if (!through_host.empty()) room.take_in(inbox, through_host);
}

void Fetcher::store_own(const ShardedBucket& sharded) const {
  sharded.room->store_shard(sharded.shard, own_shard(sharded));
  sharded.room->serve(sharded.shard, sharded.served, {});
}

void Fetcher::take_own(const ShardedBucket& sharded) const {
  sharded.room->take_shard(sharded.shard, own_shard(sharded));
}

// ---- rows of tables: see Note [Rows are fetched by lookups]

std::string Fetcher::fetch_rows(const ShardedBucket& sharded, const std::vector<int64_t>& rows,
                                const Wanted& wanted) const {
  check_may_wait("other ranks' shards");
  const Range range("fetch", sharded.index);
  const Doing doing([&sharded] { return "a lookup in " + sharded.name; }, /*per_batch=*/true);
  try {
    check_places(sharded);
    if (sharded.rows->has_pages()) {
      fetch_into_pages(sharded, rows, wanted);
    } else {
      fetch_to_device(sharded, rows, wanted);
    }
  } catch (const std::exception& error) {
    if (sharded.rows->has_pages()) {
      sharded.rows->spoil(rows);
    } else {
      sharded.room->spoil(own_shard(sharded));
    }
    return "zerox: rows of " + sharded.name + " did not arrive from all ranks: " + reason_of(error);
  }
  return "";
}

// Each row to its place.
void Fetcher::fetch_into_pages(const ShardedBucket& sharded, const std::vector<int64_t>& rows,
                               const Wanted& wanted) const {
  TableRows& table = *sharded.rows;
  sharded.room->let_write(true);
  sharded.room->take_shard(sharded.shard, table.pieces_of(peers_->rank(), rows));
  const auto pieces_of = [&](int rank) { return table.pieces_of(rank, rows); };
  peers_->fetch(question_of(sharded, wanted), sharded.places, {table.range().data(), pieces_of, {}, /*in_part=*/true});
}

// What comes through the host's memory is packed there, one owner's rows after the other's.
void Fetcher::fetch_to_device(const ShardedBucket& sharded, const std::vector<int64_t>& rows,
                              const Wanted& wanted) const {
  auto& room = dynamic_cast<DeviceRoom&>(*sharded.room);
  const size_t row_bytes = sharded.rows->row_bytes();
  const std::vector<RowMoves> moves = sharded.rows->moves_by_owner(peers_->num_holders(), rows);
  room.restore();
  room.take_rows(sharded.shard, moves[peers_->rank()], row_bytes);
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
  peers_->fetch(question_of(sharded, wanted), sharded.places,
                {static_cast<char*>(inbox.mutable_data_ptr()), pieces_of, pull, /*in_part=*/true});
  room.take_rows(inbox, through_host, row_bytes);
}

}  // namespace zx
