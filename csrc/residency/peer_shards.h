// The shards of all ranks, which any rank reads when it likes.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "peers/failure_detector.h"
#include "peers/linger.h"
#include "peers/neighbours.h"
#include "residency/shard_questions.h"
#include "residency/shard_server.h"
#include "residency/shard_stamps.h"

namespace zx {

// Note [Shards are pulled]
// With sharded parameters (ZeRO stage 3) a rank fetches a bucket when something reads it. If that took part of the
// others, as an all-gather does, all ranks would have to read in one order, and would hang where they don't: branches
// that differ, text that ends earlier on one rank, evaluation by one rank alone.
//
// But shards stay as they are from one step to the next. So a rank reads the others' shards from their memory (see Note
// [Neighbours]), or asks for them (see Note [Shards by message]), in any order, as often as it likes, whatever they do
// meanwhile. Beside its shard each rank has a few stamps, which say of which step the shard is:
//
//   version  rises when step() has written the shard. A rank at version n waits until its peers' shards reach n. It is
//            negative until the shard has its first values: see Note [A new bucket is filled]
//   written  rises when an operator outside step() has written this rank's copy of the bucket (load_state_dict, p.mul_)
//   stored   rises when that was taken over into the shard
//   came     rises when the rank comes to synchronize with all others, also in a collective of the script's own
//   left     is 1 when the last of its parameters is gone on this rank, or all are whole for good
//
// - A shard of version n is not overwritten while others read it: its owner comes to version n + 1 when all ranks have
//   met in step(), and a rank answers there only when its own reads are over (Residents::begin_update).
// - Writes outside step() have to happen on all ranks. A rank takes over its part when all have written their copies,
//   since a rank that is late may read the old values to compute the new ones. Then it reads nobody's shard before that
//   is stored. Ranks that are about to take rank 0's values (broadcast_parameters(), and where a wrapper is built)
//   stand by meanwhile: who writes then keeps its copy as it is, until all have synchronized there, and rank 0's goes
//   to the shards.
// - A rank that has come to synchronize once more than the writer writes nothing before the writer comes too. So what
//   was written is this rank's only, as where rank 0 evaluates with an average of the weights. Its copy stays as it is
//   until it comes to synchronize: it should have the values of all ranks again by then, and is compared with them.
// A rank that does not come is named after the timeout.
//
// On a mesh (replicate, shard) parameters are sharded over the shard axis only: of each bucket a rank keeps all the
// slices of its column of owners (see Note [Two levels] in csrc/exchange/two_level_exchange.h), 1/G of it, and "shard"
// and "rank" mean that part and the ranks of its own shard axis wherever parameters are read. In step() each rank
// writes its slice of that part, and gets the others along the replicate axis before its stamp says that the part is
// written (zerox/residency/residency.py).

// Note [Shards in a device's memory]
// On an accelerator a shard lies in the device's memory. Where devices can read each other's, ranks of one machine map
// the others' shards when buckets are added (zerox/residency/mapped_shards.py), and a fetch is copies between devices.
// They need no kernel, and no partner either. But the host only queues them, and runs ahead. So that the stamps above
// keep their meaning, it waits for the device in these places, and nowhere else:
//
// - Before a stamp says that a shard was written: until the device has written it (Room::serve).
// - Before another rank may overwrite a shard that this one reads: until the device has read it (Room::await_pulls).
//   That is before ranks synchronize in step() and at the end of whole(), before this rank says that it has written its
//   copy, and before it says that it has left.
//
// If any rank can't map a neighbour's shards, no rank does: each keeps a copy of its shards in the host's memory, which
// others read as on hosts. Ranks on other machines ask for that copy.
//
// A rank that is dead is found by its stamps, before anything is copied. Copies that were queued before it died read
// memory that the driver keeps for as long as it is mapped anywhere. If they were garbage all the same, no update could
// use them: the next sync() raises.

// Where a rank has a shard and its stamps, in the host's memory. `mapped`: the shard's bytes in its device's memory, as
// a tensor of this rank's device; undefined if they are read in the host's.
struct ShardPlace {
  uint64_t shard;
  uint64_t stamps;
  at::Tensor mapped{};
};

// Any thread may call any of these.
class PeerShards {
 public:
  // `ranks`: all, by their numbers, those first among whom a bucket is sharded, `num_holders` of them, this one among
  // them; everywhere here a rank is its place in this list. `processes` as in Neighbours. `comm`: to all; without a
  // group if all are neighbours. `linger`: null if ranks do not linger.
  PeerShards(Communicator comm, std::shared_ptr<Linger> linger, std::vector<int64_t> processes, std::vector<int> ranks,
             int num_holders, int rank, std::chrono::milliseconds timeout);

  int rank() const { return rank_; }
  int num_holders() const { return num_holders_; }
  bool asks_others() const { return asks_others_; }  // for a bucket; else it reads all of it in memory

  // This rank's shard of the next bucket, and that it has changed a stamp.
  void add(const at::Tensor& shard, const SharedStamps& stamps) const;
  void stamps_changed() const;
  // At the end of its script. In memory others see that.
  void come_no_more() const;

  // Where a fetch puts the others' shards: through the host's memory pieces of each into their places in `flat`, which
  // may be null if all are mapped; those that are mapped by `pull`. `in_part`: pieces are not all of a shard.
  struct Target {
    char* flat;
    std::function<std::vector<BytePiece>(int rank)> pieces_of;
    std::function<void(int rank, const at::Tensor& mapped)> pull;
    bool in_part = false;
  };
  // The others' shards of a bucket. `wanted` says how far they must have come. `places`: by rank. Throws
  // std::runtime_error that names the rank that is missing.
  void fetch(const Question& wanted, const std::vector<ShardPlace>& places, const Target& target) const;
  // Returns when all have a new bucket's first values, of those whose memory can be read. Throws as fetch().
  void await_filled(const std::vector<ShardPlace>& places) const;
  // Returns when all have written a bucket so often, or it is clear that some do not. `came`: how often this rank has
  // come to synchronize. Throws as fetch().
  Written await_written(int64_t bucket, const std::vector<ShardPlace>& places, int64_t written, int64_t came) const;

  // Whether a rank whose memory can be read has written a bucket more often, stands by, or has come to synchronize more
  // often; or another one asks who has written, and has got no answer. What died has not: it is found elsewhere.
  bool is_ahead(const std::vector<ShardPlace>& places, int64_t written, int64_t came) const;
  bool is_asked_for_writes() const { return server_ && server_->is_asked_for_writes(); }

  const std::shared_ptr<Linger>& linger() const { return linger_; }

  // This rank will fetch nothing more. Whether another has said so, or is gone: neither throws.
  void say_left() const;
  bool has_left(int rank, const ShardPlace& place) const;

 private:
  // `apart`: where the pieces arrive, if they have several places; else undefined.
  struct Awaited {
    Questions::Asked asked;
    at::Tensor apart;
    std::vector<BytePiece> pieces;
  };
  Awaited ask(int peer, const Question& wanted, const Target& target, std::vector<BytePiece> pieces) const;
  int64_t await(int rank, const ShardPlace& place, ShardStamp stamp, int64_t value) const;
  Written await_written_by(int rank, const ShardPlace& place, int64_t written, int64_t came) const;
  int64_t read_stamp(int rank, const ShardPlace& place, ShardStamp stamp) const;
  std::vector<int> others(bool neighbours, int count) const;
  int num_ranks() const { return static_cast<int>(ranks_.size()); }

  std::shared_ptr<FailureDetector> failure_detector_;
  std::shared_ptr<Linger> linger_;
  Neighbours neighbours_;
  std::vector<int> ranks_;
  int num_holders_;
  int rank_;
  bool asks_others_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<ShardQuestions> questions_;  // null if all are neighbours, as is the server
  std::unique_ptr<ShardServer> server_;
};

}  // namespace zx
