// Sharded parameters (ZeRO stage 3), of which buckets are whole on this rank at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "residency/bucket_copies.h"
#include "residency/fetcher.h"
#include "residency/filling.h"
#include "residency/handover.h"
#include "residency/peer_shards.h"
#include "residency/publisher.h"
#include "residency/readers.h"
#include "residency/turns.h"

namespace zx {

// Note [Parameters are fetched when they are read]
// A bucket is resident (all its parameters have their memory and values) or released (they have neither; each rank has
// its shard in a tensor of its own). The guard tells what an operator is about to read: those buckets are fetched, and
// pinned until the operator is over. Nothing else has a state: not modules, nor forward and backward. So it does not
// matter in which order modules run, whether they share parameters, run twice, or raise.
//
//   Readers -> Turns -> Fetcher         a read waits for its bucket's turn, and the bucket comes from all ranks' shards
//   Readers -> Publisher -> Fetcher     a write goes into this rank's shard; step() writes all
//   BucketCopies: Cache, Uses           which buckets are whole, which of them go, and who uses them
//
// step() writes shards, not buckets. So all buckets are released there, and fetched anew as the next forward reads
// them.

// By the optimizer's caller.
class Residents {
 public:
  Residents(std::shared_ptr<const PeerShards> peers, HiddenReads hidden);
  Residents(const Residents&) = delete;
  Residents& operator=(const Residents&) = delete;

  // What a guard is to tell of reads; it lives as long as `self`.
  static std::shared_ptr<ReadGuard::Watcher> watcher(const std::shared_ptr<Residents>& self) {
    return {self, &self->readers_};
  }

  // Memory for a bucket's parameters.
  std::shared_ptr<Room> make_room(size_t bytes, c10::Device device) { return copies_.make_room(bytes, device); }
  std::shared_ptr<Room> make_table_room(size_t bytes, c10::Device device) {
    return copies_.make_table_room(bytes, device);
  }
  // Adds a bucket that has no values yet, nor has `shard`, which is to have this rank's part of them and must stay
  // where it is. `is_served`: whether a rank reads it in the host's memory. Returns its index.
  // `shard_starts`: of the shards of those among whom it is sharded, in elements, and the end of the last.
  int64_t add(std::string name, std::shared_ptr<Room> room, at::Tensor shard, const std::vector<int64_t>& shard_starts,
              bool is_served);
  // The same of a table, whose room is of make_table_room(). `shard`: the rows that this rank owns, with their values;
  // `of_block`: see RowOwners.
  int64_t add_table(std::string name, std::shared_ptr<Room> room, at::Tensor shard, bool is_served, int64_t num_rows,
                    const at::Tensor& of_block);
  // A bucket with its values, that handover() of others has given.
  int64_t take(std::string name, std::shared_ptr<Room> room, at::Tensor shard, const std::vector<int64_t>& shard_starts,
               bool is_served);
  // To be called after these: reads of all of them are seen from now on.
  void watch_added() { readers_.watch_added(); }
  // Where this rank has its shard, for the others.
  ShardPlace place(int64_t bucket) const;
  // How what was added gets its values, once all have told.
  Filling& filling() { return filling_; }

  // Of this rank, if others read it.
  void set_state(const std::shared_ptr<PublishedState>& state) { publisher_.set_state(state); }

  // How much may be resident; no limit at first.
  void set_limit(size_t bytes);

  // Before all ranks synchronize in step(): afterwards no thread of this rank reads another's shard until end_update().
  void begin_update();
  // The shard has the values of this step. `rows`: see Room::serve().
  void publish(int64_t bucket, const at::Tensor& rows) { publisher_.publish(bucket, rows); }
  // Publishes the rest too, and releases all buckets. `is_update`: false if step() raised before anything was written.
  // `any_written`: whether shards may have been written that were not published.
  void end_update(bool is_update, bool any_written);

  // Fetches all, and keeps them until leave_whole(). Calls may be inside others.
  void enter_whole();
  void leave_whole();
  void refresh_whole();  // after a step() inside
  // What was written since the first enter_whole().
  std::vector<int64_t> written_inside() const { return publisher_.written_inside(); }
  // Takes it over, or takes it back. All ranks must do the same, before any of them leaves.
  void keep_written(const std::vector<int64_t>& buckets) { publisher_.keep_written(buckets); }
  void drop_written(const std::vector<int64_t>& buckets) { publisher_.drop_written(buckets); }

  // From now on this rank writes nothing, and is about to take rank 0's values; or not any more. All ranks must meet in
  // between, and again afterwards before one of them writes.
  void stand_by(bool does);
  // What was written here meanwhile: it stays as it is until let_kept_go(), which all that was kept is released after.
  std::vector<int64_t> kept() const { return publisher_.kept(Stays::kept); }
  void let_kept_go() { publisher_.let_kept_go(Stays::kept); }

  // Before ranks synchronize, and before begin_update(): takes back what was written on this rank only. Returns the
  // buckets in which it differed from what all ranks have.
  std::vector<int64_t> take_back();
  // This rank comes to synchronize: others do not wait for writes of its own.
  void come();
  // Whether another rank is known to wait until this one writes or comes.
  bool is_awaited() const { return publisher_.is_awaited(); }
  // There is no optimizer any more, by which ranks come to synchronize.
  void come_nowhere() { publisher_.come_nowhere(); }

  // To a new optimizer of the same parameters.
  Handover& handover() { return handover_; }
  // What must be the same there: how many ranks hold shards, which of them this one is, and whether hidden reads fault.
  std::tuple<int, int, bool> kind() const {
    return {peers_->num_holders(), peers_->rank(), copies_.hidden_reads() == HiddenReads::fault};
  }

  // What could not be fetched, or was written and is lost, since the last take; empty if nothing.
  std::string failure();
  std::string take_failure();

  // For tests: everything is released as soon as no operator uses it.
  void set_hostile(bool hostile) { copies_.set_hostile(hostile); }
  // What nobody reads now, with what was to come ahead.
  void release_all();

  ResidentCounts counts();
  void record(bool on);
  std::vector<ResidencyEvent> take_events();
  size_t resident_bytes();
  // The most that were resident at a time since the last call.
  size_t take_most_bytes();
  size_t room_bytes() { return copies_.room_bytes(); }  // of what is resident, and spare
  size_t served_bytes() const;                          // of copies of shards that others read in the host's memory
  std::vector<bool> resident();
  size_t num_calls() const { return readers_.num_calls(); }
  // This rank fetches nothing any more, and says so to the others.
  void stop_reading();
  // Nobody here reads any of it any more, unless all is whole. Others may still read this rank's shards, which are kept
  // until all have stopped reading. Null: lets go of those whose time has come.
  static void keep_for_others(const std::shared_ptr<Residents>& gone);

 private:
  int64_t add(std::unique_ptr<ShardedBucket> added, bool is_served, bool is_filled);
  void let_rooms_go();

  const std::shared_ptr<const PeerShards> peers_;
  std::optional<Linger::Reader> reader_;
  BucketCopies copies_;
  const Fetcher fetcher_;
  Publisher publisher_;
  Turns turns_;
  Readers readers_;
  Handover handover_;
  Filling filling_;
};

}  // namespace zx
