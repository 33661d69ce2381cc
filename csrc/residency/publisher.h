// This rank's shards, as others read them: of which step they are, and what was written outside step(). See Note
// [Shards are pulled].
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "peers/published_state.h"
#include "residency/bucket_copies.h"
#include "residency/fetcher.h"
#include "residency/peer_shards.h"

namespace zx {

// By the optimizer's caller, but for take_over(). Waits for devices and ranks, never under the lock.
class Publisher {
 public:
  Publisher(BucketCopies& copies, const Fetcher& fetcher, std::shared_ptr<const PeerShards> peers)
      : copies_(copies), fetcher_(fetcher), peers_(std::move(peers)) {}
  Publisher(const Publisher&) = delete;
  Publisher& operator=(const Publisher&) = delete;

  // Of which a part is in the parameters: it changes with each write.
  void set_state(const std::shared_ptr<PublishedState>& state) {
    const BucketCopies::Lock lock(copies_.mutex);
    state_ = state;
  }

  // Before others know of a new bucket, which is added afterwards. `is_filled`: it and its shard have their values.
  void announce(ShardedBucket& sharded, bool is_filled);
  // The shard has its first values; or those that have none yet never will.
  void publish_first(ShardedBucket& sharded);
  void give_up_filling();
  // The step whose values the shards have: what is fetched must be of the same.
  int64_t version(BucketCopies::Locked /*lock*/) const { return version_; }

  // ---- step(), when no thread of this rank reads others' shards

  void begin_update();
  // The shard has the values of this step. `rows`: see Room::serve().
  void publish(int64_t bucket, const at::Tensor& rows);
  // Publishes the rest too, and releases all buckets. `any_written`: whether shards may have been written that were not
  // published.
  void end_update(bool any_written);
  // Returns when no device reads other ranks' memory any more, as it must be before ranks synchronize and overwrite it.
  void await_pulls() const;

  // ---- what is written outside it

  // By an operator, on the thread that ran it. The buckets are pinned.
  void take_over(const std::vector<int64_t>& written);
  // This rank writes nothing, and is about to take rank 0's values; or not any more.
  void stand_by(bool does);
  // What was written while another rank stood by, and stays as it is until let_kept_go(); or on this rank only, while
  // others went on.
  std::vector<int64_t> kept(Stays why) const;
  void let_kept_go(Stays why);
  // This rank is about to synchronize with the others: it writes nothing before.
  void come();
  // Whether another one waits until this one writes or comes, as far as memory shows it. Any thread.
  bool is_awaited() const;
  // It synchronizes no more, and so it can't know that another rank is ahead.
  void come_nowhere();

  // ---- inside whole()

  // From now on these are the values of which written_inside() tells a difference.
  void note_digests();
  void note_digest(int64_t bucket);
  std::vector<int64_t> written_inside() const;
  // Takes it over, or takes it back.
  void keep_written(const std::vector<int64_t>& buckets);
  void drop_written(const std::vector<int64_t>& buckets);

  // ---- the end

  void say_left();
  bool is_read_by_others() const;

 private:
  std::vector<ShardedBucket*> all() const;
  std::vector<ShardedBucket*> to_take_over(const std::vector<int64_t>& written) const;
  std::string keep(ShardedBucket& sharded, Stays why);
  static void take_back(ShardedBucket& sharded);
  void store(const ShardedBucket& sharded) const;

  BucketCopies& copies_;
  const Fetcher& fetcher_;
  const std::shared_ptr<const PeerShards> peers_;
  std::weak_ptr<PublishedState> state_{};  // the optimizer's, if others read it; under the lock of the copies
  int64_t came_ = 0;                       // how often this rank has come to synchronize; under the lock of the copies
  int64_t version_ = 0;                    // the optimizer's caller writes it, under the lock of the copies
  std::vector<uint64_t> digests_;          // by bucket, at the beginning of whole(); the optimizer's caller's own
};

}  // namespace zx
