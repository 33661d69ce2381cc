// The shards of all ranks, which any rank reads when it likes.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "exchange/neighbours.h"
#include "exchange/whereabouts.h"

namespace zx {

// Note [Shards are pulled]
// With sharded parameters (ZeRO stage 3) a rank fetches a bucket when something reads it. If that took part of the
// others, as an all-gather does, all ranks would have to read in one order, and would hang where they don't: branches
// that differ, text that ends earlier on one rank, evaluation by one rank alone.
//
// But shards stay as they are from one step to the next. So a rank reads the others' shards from their memory (see Note
// [Neighbours]), in any order, as often as it likes, whatever they do meanwhile. Beside its shard each rank has a few
// numbers, which say of which step the shard is:
//
//   version  rises when step() has written the shard. Whoever has come to version n waits until the others' have.
//   written  rises when an operator outside step() has written this rank's copy of the bucket (load_state_dict, p.mul_)
//   stored   rises when that was taken over into the shard
//   left     is 1 when this rank has deleted its optimizer, and reads no shards any more
//
// - A shard of version n is not overwritten while others read it: its owner comes to version n + 1 when all ranks have
//   met in step(), and a rank answers there only when its own reads are over (Residents::begin_update).
// - Writes outside step() have to happen on all ranks. A rank takes over its part when all have written their copies,
//   since a rank that is late may read the old values to compute the new ones. Then it reads nobody's shard before that
//   is stored.
// A rank that does not come is named after the timeout.

enum class ShardWord : uint8_t { version, written, stored, left };
struct SharedWords {
  std::atomic<int64_t> of[4] = {0, 0, 0, 0};
};

// Where a rank has a shard and its words.
struct ShardPlace {
  uint64_t shard;
  uint64_t words;
};

// Any thread may call any of these.
class PeerShards {
 public:
  PeerShards(std::shared_ptr<Whereabouts> whereabouts, std::vector<int64_t> processes, int rank,
             std::chrono::milliseconds timeout)
      : whereabouts_(std::move(whereabouts)), neighbours_(std::move(processes)), rank_(rank), timeout_(timeout) {}

  int rank() const { return rank_; }
  int world() const { return neighbours_.world(); }

  // Returns when a word of `rank` is at least `value`. Throws std::runtime_error that names the rank that is missing.
  void await(int rank, const ShardPlace& place, ShardWord word, int64_t value) const;
  // Copies the first `bytes` of a rank's shard. Throws as await().
  void read(int rank, const ShardPlace& place, void* into, size_t bytes) const;
  // Whether the rank is gone, or has deleted its optimizer. Never throws.
  bool has_left(int rank, const ShardPlace& place) const;

 private:
  int64_t read_word(int rank, const ShardPlace& place, ShardWord word) const;

  std::shared_ptr<Whereabouts> whereabouts_;
  Neighbours neighbours_;
  int rank_;
  std::chrono::milliseconds timeout_;
};

}  // namespace zx
