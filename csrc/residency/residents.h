// Which buckets of sharded parameters are whole on this rank at a time (ZeRO stage 3).
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "params/read_guard.h"
#include "residency/faults.h"
#include "residency/peer_shards.h"
#include "residency/python_functions.h"
#include "residency/read_script.h"
#include "residency/residency_log.h"
#include "residency/rooms.h"
#include "residency/table_rows.h"
#include "workers/process.h"
#include "workers/worker.h"

namespace zx {

// Note [Parameters are fetched when they are read]
// A bucket is resident (all its parameters have their memory and values) or released (they have neither; each rank has
// its shard in a tensor of its own). The guard tells what an operator is about to read: those buckets are fetched, and
// pinned until the operator is over. Nothing else has a state: not modules, nor forward and backward. So it does not
// matter in which order modules run, whether they share parameters, run twice, or raise.
//
// Resident buckets are a cache. When a bucket comes and the limit would be passed, those go that are needed latest (see
// Note [What is needed next]). Pinned ones stay: if an operator reads more than the limit at once, the limit is passed
// for as long as it runs, and a warning says so once. Buckets that come over a wire are fetched ahead, into the room
// that is left.
//
// step() writes shards, not buckets. So all buckets are released there, and fetched anew as the next forward reads
// them.

struct ResidentCounts {
  int64_t fetches = 0;        // buckets that were fetched
  int64_t fetched_bytes = 0;  // of other ranks' shards
  int64_t faults = 0;         // reads and writes that no operator announced
  int64_t waits = 0;          // reads that had to wait for a bucket
  int64_t prefetches = 0;     // among the fetches: those ahead of the read
  int64_t waited_ns = 0;      // by those reads, added up over threads
};

// Any thread may call any of these. In a forked child released parameters can't be fetched: see Note [Forks].
class Residents final : public ReadGuard::Watcher, public FaultReader {
 public:
  Residents(std::shared_ptr<const PeerShards> peers, HiddenReads hidden);
  ~Residents() override;
  Residents(const Residents&) = delete;
  Residents& operator=(const Residents&) = delete;

  // ---- by the optimizer's caller

  // Memory for a bucket's parameters.
  std::shared_ptr<Room> make_room(size_t bytes, c10::Device device);
  std::shared_ptr<Room> make_table_room(size_t bytes, c10::Device device);
  // Adds a bucket, resident: `room` has its values, `shard` this rank's part of them, which must stay where it is.
  // `is_served`: whether a rank reads it in the host's memory. Returns its index.
  int64_t add(std::string name, std::shared_ptr<Room> room, at::Tensor shard, bool is_served);
  // The same of a table, whose room is of make_table_room(). `shard`: the rows that this rank owns; `of_block`: see
  // RowOwners.
  int64_t add_table(std::string name, std::shared_ptr<Room> room, at::Tensor shard, bool is_served, int64_t num_rows,
                    const at::Tensor& of_block);
  // To be called after add(): reads of all of them are seen from now on.
  void watch_added();
  // Where this rank has its shard, for the others; and where all have theirs, once they have told.
  ShardPlace place(int64_t bucket) const;
  void set_places(int64_t bucket, std::vector<ShardPlace> by_rank);

  // How much may be resident; no limit at first.
  void set_limit(size_t bytes);

  // Before all ranks synchronize in step(): afterwards no thread of this rank reads another's shard until end_update().
  void begin_update();
  // The shard has the values of this step. `rows`: see Room::serve().
  void publish(int64_t bucket, const at::Tensor& rows);
  // Publishes the rest too, and releases all buckets. `is_update`: false if step() raised before anything was written.
  // `any_written`: whether shards may have been written that were not published.
  void end_update(bool is_update, bool any_written);

  // Fetches all, and keeps them until leave_whole(). Calls may be inside others.
  void enter_whole();
  void leave_whole();
  void refresh_whole();  // after a step() inside
  // What was written since the first enter_whole().
  std::vector<int64_t> written_inside() const;
  // Takes it over, or takes it back. All ranks must do the same, before any of them leaves.
  void keep_written(const std::vector<int64_t>& buckets);
  void drop_written(const std::vector<int64_t>& buckets);

  // From now on this rank writes nothing, and is about to take rank 0's values; or not any more. All ranks must meet in
  // between, and again afterwards before one of them writes.
  void stand_by(bool does);
  // What was written here meanwhile: it stays as it is until let_kept_go(), which all that was kept is released after.
  std::vector<int64_t> kept() const;
  void let_kept_go();

  // What could not be fetched, or was written and is lost, since the last take; empty if nothing.
  std::string failure() const;
  std::string take_failure();

  // For tests: everything is released as soon as no operator uses it.
  void set_hostile(bool hostile) { hostile_ = hostile; }
  void release_all();

  ResidentCounts counts() const;
  void record(bool on);
  std::vector<ResidencyEvent> take_events();
  size_t resident_bytes() const;
  // The most that were resident at a time since the last call.
  size_t take_most_bytes();
  size_t room_bytes() const;    // of what is resident, and spare
  size_t served_bytes() const;  // of copies of shards that others read in the host's memory
  std::vector<bool> resident() const;
  size_t num_calls() const;
  // The optimizer is about to go: makes everything whole, for good.
  void make_whole_for_good();
  // It is gone. Others may still read this rank's shards, which are kept until all have come here. Null: lets go of
  // those whose time has come.
  static void keep_for_others(const std::shared_ptr<Residents>& gone);

  // ---- ReadGuard::Watcher

  void before_read(const at::Tensor& tensor, const ReadGuard::Use& use) override;
  // Where they fault (see Note [Reads that nothing announces]) so do hidden writes. Elsewhere all are fetched.
  void before_hidden_reads(const char* reader, ReadGuard::Pins& pins) override;
  void before_function(const ReadGuard::PythonFunction& function, const ReadGuard::Pins& reads) override;
  void before_backward_of(const ReadGuard::PythonFunction& function, ReadGuard::Pins& pins) override;
  void after_operator(const ReadGuard::Pins& pins) override;
  bool has_seen_enough() const override { return false; }
  bool watches_all_threads() const override { return true; }
  void before_fork() override {}
  bool has_arrived() const override { return false; }  // a child finds some released

  // ---- FaultReader

  bool access_at(const void* address, bool is_write) override;

 private:
  enum class State : uint8_t { released, arriving, resident };
  // Pinned beside operators: `lent` to a collective, and writable, until the next step(); `kept` since it was written
  // here while another rank stood by.
  enum class Stays : uint8_t { no, lent, kept };
  // This rank's whole copy of a bucket.
  struct Copy {
    std::atomic<State> state = State::resident;
    int64_t pins = 0;
    int64_t waiting = 0;  // among the pins: those of threads that do not read yet
    int64_t writers = 0;  // among the pins: those of operators that may write
    uint64_t touched = 0;
    int64_t version = 0;    // of the step whose values others' shards must have
    int64_t written = 0;    // how often the copy was written outside step()
    bool is_stale = false;  // parts of it that others own are older than `version`
    Stays stays = Stays::no;
    bool is_old = false;  // all of it is older than `version`
    uint64_t digest = 0;  // at the beginning of whole()
    size_t held = 0;      // bytes of memory
  };
  struct ShardedBucket : Copy {
    int64_t index = 0;
    std::string name;
    std::shared_ptr<Room> room;
    at::Tensor shard;
    std::unique_ptr<TableRows> rows{};         // null if it is a bucket, and no table
    const void* address = nullptr;             // of the shard, as others know it
    at::Tensor served{};                       // the shard as others read it in the host's memory; undefined if none do
    SharedStamps& stamps = *new SharedStamps;  // never freed: others may read them when this rank's optimizer is gone
    std::vector<ShardPlace> places{};          // by rank; empty until all ranks have theirs
  };
  struct ByAddress {
    const char* start;
    const char* stop;
    int64_t bucket;
  };

  int64_t bucket_at(const void* address) const;
  int64_t bucket_of(const at::Tensor& tensor) const;
  bool before_lookup(int64_t bucket, const at::Tensor& tensor, const ReadGuard::Use& use);
  void warn_of_whole(ShardedBucket& sharded, const char* reader);
  void pin_rows(ShardedBucket& sharded, const at::Tensor& indices, const char* reader);
  std::string fetch_rows_now(ShardedBucket& sharded, const at::Tensor& indices, std::unique_lock<std::mutex>& lock,
                             const char* reader);
  std::string fetch_rows(ShardedBucket& sharded, const std::vector<int64_t>& missing);
  void fetch_into_pages(ShardedBucket& sharded, const std::vector<int64_t>& missing);
  void fetch_to_device(ShardedBucket& sharded, const std::vector<int64_t>& missing);
  static Question wanted_of(const ShardedBucket& sharded);
  void end_lookup(int64_t bucket);
  void hold(ShardedBucket& sharded, size_t bytes);
  void pin(int64_t bucket, const char* reader);
  void pin_here(int64_t bucket, const char* reader);
  void begin_use(ShardedBucket& sharded);
  void pin_for(int64_t bucket, const char* reader, ReadGuard::Pins& pins);
  void refuse_collective(ShardedBucket& sharded);
  void let_write(int64_t bucket);
  std::string fetch(ShardedBucket& sharded, bool memory_too, bool own_too);
  void check_not_given_up() const;
  std::string wait_for(const ShardedBucket& sharded, std::unique_lock<std::mutex>& lock,
                       const std::function<std::string()>& fetch);
  std::string fetch_now(ShardedBucket& sharded, std::unique_lock<std::mutex>& lock, const char* reader,
                        bool ahead = false);
  bool is_up_to_date(const ShardedBucket& sharded) const;
  void evict_for(size_t bytes, const char* reader);
  bool fits_beside_pinned(size_t bytes) const;
  void look_ahead();
  ShardedBucket* next_to_prefetch();
  void release(ShardedBucket& sharded);
  bool may_be_released(const ShardedBucket& sharded) const;
  bool is_read_now(const ShardedBucket& sharded) const;
  bool is_read_by_others() const;
  void take_over(const std::vector<int64_t>& written);
  void store_own(ShardedBucket& sharded);
  void keep(ShardedBucket& sharded);
  std::vector<BytePiece> shard_of(const ShardedBucket& sharded, int rank) const;
  std::vector<BytePiece> own_shard(const ShardedBucket& sharded) const { return shard_of(sharded, peers_->rank()); }
  std::vector<Room::ByteSpan> spans_through_host(const ShardedBucket& sharded) const;
  void await_pulls() const;
  void note_digests();
  void in_child(ShardedBucket& sharded);

  const std::shared_ptr<const PeerShards> peers_;
  Rooms rooms_;
  Process process_;
  std::atomic<bool> hostile_ = false;
  std::atomic<const std::vector<ByAddress>*> by_address_;  // those whose reads fault
  mutable std::mutex mutex_;                               // of all below, and of each ShardedBucket
  std::condition_variable changed_;
  std::vector<std::unique_ptr<ShardedBucket>> buckets_;
  std::vector<std::unique_ptr<const std::vector<ByAddress>>> snapshots_;
  struct {
    PythonFunctions functions{};
    ReadScript script{};
    ResidencyLog log{};
  } past_;
  struct {
    size_t limit = std::numeric_limits<size_t>::max();
    size_t resident_bytes = 0;
    size_t most_bytes = 0;  // that were resident at a time, since take_most_bytes()
    uint64_t clock = 0;
    int64_t version = 0;
    int64_t num_fetching = 0;
    int64_t whole = 0;  // how many whole() are open
    bool updating = false;
    std::thread::id updater{};
    bool ending = false;  // the optimizer is being deleted
    bool forgotten = false;
    std::string failure{};
    ResidentCounts counts{};
  } now_;
  struct {
    bool is_under_way = false;  // a task of the worker
    bool is_arriving = false;   // a bucket that it fetches
    Worker worker{"zerox ahead"};
  } ahead_;  // last: the worker uses the others
};

}  // namespace zx
