// A bucket of sharded parameters, or a table: its memory on this rank, and the ranks' shards of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "peers/neighbours.h"
#include "residency/peer_shards.h"
#include "residency/room.h"
#include "residency/shard_stamps.h"
#include "residency/table_rows.h"

namespace zx {

struct ShardedBucket {
  int64_t index = 0;
  std::string name;
  std::shared_ptr<Room> room;  // null when it was given away, or all is over
  at::Tensor shard;
  std::vector<size_t> starts{};              // of each rank's shard in the bucket, in bytes, and the end of the last
  std::unique_ptr<TableRows> rows{};         // null if it is a bucket, and no table
  const void* address = nullptr;             // of the shard, as others know it
  at::Tensor served{};                       // the shard as others read it in the host's memory; undefined if none do
  SharedStamps& stamps = *new SharedStamps;  // never freed: others may read them when this rank's optimizer is gone
  int64_t written = 0;                       // how often the copy was written outside step()
  std::vector<ShardPlace> places{};          // by rank; empty until all ranks have theirs

  // Whether it has its first values: see Note [A new bucket is filled].
  bool is_filled() const { return stamps.get(ShardStamp::version) >= 0; }

  // Where a rank's shard lies in the whole, in order.
  std::vector<BytePiece> shard_of(int rank) const {
    if (rows != nullptr) return rows->shard_of(rank);
    return {{0, starts.at(rank), starts.at(rank + 1) - starts.at(rank)}};
  }
};

}  // namespace zx
