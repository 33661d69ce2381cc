// How a deleted optimizer's shards come to a new one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "residency/bucket_copies.h"
#include "residency/publisher.h"
#include "residency/readers.h"
#include "residency/turns.h"

namespace zx {

// Note [Shards are handed over]
// A new optimizer whose bucket has the parameters of a bucket that is there, in the same places, on the same ranks,
// needs no value of it: it takes the room and the shard as they are, and nobody fetches anything
// (zerox/residency/takeover.py says for which buckets). All ranks do that together:
//
//   begin()    no thread of this rank fetches any more, and what is to go has no memory
//   (meet)     nobody reads the old shards
//   give()     to the new optimizer's Residents, which announce the shards to all ranks, as those of any new bucket
//   end()      what else the old one has is read as before
//
// By the new optimizer's caller.
class Handover {
 public:
  Handover(BucketCopies& copies, Turns& turns, const Publisher& publisher, Readers& readers)
      : copies_(copies), turns_(turns), publisher_(publisher), readers_(readers) {}
  Handover(const Handover&) = delete;
  Handover& operator=(const Handover&) = delete;

  // The bucket that a tensor lies in, or -1; its memory, which must not have been given away, and this rank's shard.
  int64_t bucket_of(const at::Tensor& tensor) const { return readers_.bucket_of(tensor); }
  std::shared_ptr<Room> room(int64_t bucket) const { return copies_[bucket].room; }
  at::Tensor shard(int64_t bucket) const { return copies_[bucket].shard; }
  // Whether it could be given away now, if nobody begins to use it.
  bool is_free(int64_t bucket);
  // Of the step whose values the shards have.
  int64_t version();

  // False if something of them is in use.
  bool begin(const std::vector<int64_t>& buckets);
  // The bucket's memory, whose addresses are nobody's now.
  std::shared_ptr<Room> give(int64_t bucket);
  void end();

 private:
  BucketCopies& copies_;
  Turns& turns_;
  const Publisher& publisher_;
  Readers& readers_;
};

}  // namespace zx
