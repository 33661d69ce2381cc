// How a bucket's values come from all ranks' shards, and how this rank's go into its own: see Note [Shards are pulled].
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "residency/peer_shards.h"
#include "residency/sharded_bucket.h"

namespace zx {

// What a fetch is to bring.
struct Wanted {
  int64_t version = 0;      // of the step whose values others' shards must have
  int64_t written = 0;      // how often they must have been written outside step()
  bool memory_too = false;  // the bucket has none
  bool own_too = false;     // this rank's own part of it too
};

// Waits for other ranks and for devices, so no thread holds a lock while it calls any of these. Who calls it sees to it
// that nobody else fetches the bucket, or releases it. Has no state of its own.
class Fetcher {
 public:
  explicit Fetcher(std::shared_ptr<const PeerShards> peers) : peers_(std::move(peers)) {}

  // They return the error, if not everything has arrived. An error leaves NaN behind, so that nobody takes what is
  // there for parameters.
  std::string fetch(const ShardedBucket& sharded, const Wanted& wanted) const;
  std::string fetch_rows(const ShardedBucket& sharded, const std::vector<int64_t>& rows, const Wanted& wanted) const;
  // Of these rows, the bytes that come from other ranks.
  int64_t bytes_of_others(const ShardedBucket& sharded, const std::vector<int64_t>& rows) const {
    return sharded.rows->bytes_of_others(peers_->rank(), rows);
  }

  // Takes this rank's part of what was written into its shard, for others to read; or takes it back from there.
  void store_own(const ShardedBucket& sharded) const;
  void take_own(const ShardedBucket& sharded) const;

 private:
  std::vector<BytePiece> own_shard(const ShardedBucket& sharded) const { return sharded.shard_of(peers_->rank()); }
  std::vector<Room::ByteSpan> spans_through_host(const ShardedBucket& sharded) const;
  void fetch_whole(const ShardedBucket& sharded, const Wanted& wanted) const;
  void fetch_into_pages(const ShardedBucket& sharded, const std::vector<int64_t>& rows, const Wanted& wanted) const;
  void fetch_to_device(const ShardedBucket& sharded, const std::vector<int64_t>& rows, const Wanted& wanted) const;

  const std::shared_ptr<const PeerShards> peers_;
};

}  // namespace zx
