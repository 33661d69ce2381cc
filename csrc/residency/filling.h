// How new buckets get their first values.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "residency/bucket_copies.h"
#include "residency/peer_shards.h"
#include "residency/publisher.h"
#include "residency/turns.h"

namespace zx {

// Note [A new bucket is filled]
// An optimizer's limit holds from its first bucket on. So all its new buckets are added before they have values, and
// all ranks tell each other where their shards will be. Then the buckets are filled, in one order on all ranks:
//
//   begin()      it gets memory, for which others are released
//                the parameters' values move in, rank 0's come over them, and the shard takes this rank's part
//   end()        its shard is announced, operators are watched, and it may be released
//
// One after the other, but those whose parameters were on the meta device: their values come module by module, and a
// module's parameters may lie in several buckets (zerox/plan/materialize.py).
//
// What is released has to be fetched again, so it is released only when all ranks have filled it. Neighbours' stamps
// say so, for which begin() waits if it needs the room, and else await_filled(). Shards that come by message are waited
// for by the fetch itself: if a rank raises, nobody reads by message any more.
//
// Until end() a bucket is none of the guard's. Its memory stays, and is the optimizer's own to write, by collectives
// too. If something raises meanwhile, this is how it stays: the parameters that have come into it can be read, and
// those that have not are where they were. See also zerox/residency/new_buckets.py.

// By the optimizer's caller. Waits for devices and ranks, never under the lock.
class Filling {
 public:
  Filling(BucketCopies& copies, Turns& turns, Publisher& publisher, std::shared_ptr<const PeerShards> peers)
      : copies_(copies), turns_(turns), publisher_(publisher), peers_(std::move(peers)) {}
  Filling(const Filling&) = delete;
  Filling& operator=(const Filling&) = delete;

  // Gives a bucket memory, all zero.
  void begin(int64_t bucket);
  // It has its values, as this rank's shard has. Of a table, and of what was handed over, only the shard.
  // `by_rank`: where all have theirs.
  void end(int64_t bucket, std::vector<ShardPlace> by_rank);
  // All are filled here: returns when they are on all ranks.
  void await_filled();
  // This rank has raised: what it has not filled nobody waits for.
  void give_up() { publisher_.give_up_filling(); }

 private:
  void let_first_go();

  BucketCopies& copies_;
  Turns& turns_;
  Publisher& publisher_;
  const std::shared_ptr<const PeerShards> peers_;
  std::deque<int64_t> filled_;  // here, maybe not on all ranks: first those that were filled first
};

}  // namespace zx
