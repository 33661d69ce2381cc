// Who may fetch a bucket now: readers, the worker that fetches ahead, and in between step(), which writes shards.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "residency/bucket_copies.h"
#include "residency/fetcher.h"
#include "residency/publisher.h"
#include "workers/worker.h"

namespace zx {

// Any thread may call any of these.
class Turns {
 public:
  // `asks_others`: whether buckets come over a wire.
  Turns(BucketCopies& copies, const Fetcher& fetcher, const Publisher& publisher, bool asks_others)
      : copies_(copies), fetcher_(fetcher), publisher_(publisher), asks_others_(asks_others) {}
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  // ---- a bucket that this thread has pinned, without the lock

  // They return when it is resident, or when the rows are here that a lookup names: the error, if they have not
  // arrived. (Raising it needs the GIL, for which no lock may be held, and nobody may be waiting for this thread.) They
  // wait for other threads and ranks, so not with the GIL.
  std::string bring(int64_t bucket, const char* reader);
  std::string bring_rows(int64_t bucket, const at::Tensor& indices, const char* reader);
  // Waits for one of these, without the GIL, and counts the time.
  std::string await(int64_t bucket, const std::function<std::string()>& brought);

  // ---- the same in two steps, for a thread that keeps the GIL

  // What is to be done for a bucket whose turn it is.
  struct Turn {
    bool is_needed = false;
    bool is_ahead = false;
    bool is_in_update = false;
    Wanted wanted{};
  };
  // Nothing if it has to wait for another thread: then bring() does, without the GIL.
  std::optional<Turn> begin_at_once(int64_t bucket, const char* reader, BucketCopies::Locked lock);
  std::string finish(int64_t bucket, const Turn& turn);

  // To be called when another bucket is read than before.
  void look_ahead(BucketCopies::Locked lock);

  // ---- step()

  // No thread of this rank reads another's shard from here, but the caller, until end_update().
  void begin_update();
  bool is_updating() const;
  void end_update();

  // Nothing is fetched ahead until another bucket is read.
  void await_ahead();
  // Returns when the bucket is not fetched ahead.
  void await_ahead(int64_t bucket);
  // No thread of this rank fetches anything any more.
  void end();

 private:
  struct Ahead {
    int64_t bucket;
    Turn turn;
  };

  bool has_come(int64_t bucket, BucketCopies::Locked lock) const;
  bool has_come_for_rows(int64_t bucket, BucketCopies::Locked lock) const;
  bool may_read_shards() const { return !is_updating_ || updater_ == std::this_thread::get_id(); }
  Turn begin(int64_t bucket, const char* reader, BucketCopies::Locked lock);
  Turn begin_fetch(int64_t bucket, BucketCopies::Locked lock);
  void end_fetch(int64_t bucket, const std::string& failure, BucketCopies::Locked lock);
  std::optional<Ahead> begin_ahead();
  void end_looking(BucketCopies::Locked lock);
  void fetch_ahead();

  BucketCopies& copies_;  // of which the lock guards all below
  const Fetcher& fetcher_;
  const Publisher& publisher_;
  const bool asks_others_;
  int64_t num_fetching_ = 0;
  bool is_updating_ = false;
  std::thread::id updater_{};
  bool is_looking_ahead_ = false;  // a task of the worker
  bool is_one_ahead_ = false;      // a bucket that it fetches
  Worker worker_{"zerox ahead"};   // last: it uses the others
};

}  // namespace zx
