#include "residency/lookups.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <exception>
#include <string>

#include "check.h"
#include "locks.h"
#include "residency/unseen.h"
#include "torch_internals.h"

namespace zx {
namespace {

// The host waits for the device here: which rows are to be fetched hangs on them. Undefined if it could not: the caller
// of the lookup raises then.
at::Tensor on_host(const at::Tensor& indices) {
  if (indices.is_cpu()) return indices;
  check_may_wait("a device");
  at::Tensor copied;
  std::string failure;
  ReadGuard::without_gil([&] {
    try {
      const Unseen unseen;
      copied = indices.to(at::kCPU);
    } catch (const std::exception& error) {
      failure = reason_of(error);
    }
  });
  if (!failure.empty()) ReadGuard::raise_soon("zerox: which rows are looked up was not to be had: " + failure);
  return copied;
}

}  // namespace

// What a lookup of this thread calls reads no other rows.
bool Lookups::reads_nothing(int64_t bucket, const ReadGuard::Use& use) const {
  return copies_.uses_here().is_used_here(Uses::lookup_of(bucket)) || use.is_view() ||
         internals::reads_no_value(use.name());
}

bool Lookups::begin(int64_t bucket, const at::Tensor& tensor, const ReadGuard::Use& use) {
  if (reads_nothing(bucket, use)) return true;
  const ShardedBucket& sharded = copies_[bucket];
  if (std::strcmp(use.name(), internals::kRenorm) == 0) {
    ReadGuard::raise_soon("zerox: max_norm= of an embedding writes " + sharded.name +
                          " in each forward, which is sharded by rows (stage=3): make the module without max_norm, or "
                          "train in stage=2");
  }
  const at::Tensor* indices = nullptr;
  {
    const BucketCopies::Lock lock(copies_.mutex);
    if (sharded.room == nullptr) return true;  // all is whole for good
    indices = looked_up(use, tensor, *sharded.room, sharded.rows->row_bytes());
  }
  if (indices == nullptr) {
    if (!use.is_write(/*if_unknown=*/false)) warn_of_whole(bucket, use.name());
    return false;
  }
  if (copies_.is_in_child()) {
    copies_.restore_in_child(bucket);
    return true;
  }
  const at::Tensor known = on_host(*indices);
  if (!known.defined()) return true;
  pin_rows(bucket, known, use.name());
  copies_.begin_use(bucket);
  copies_.uses_here().note_here(Uses::lookup_of(bucket));
  use.pin(Uses::lookup_of(bucket), tensor, /*to_read=*/true);
  return true;
}

void Lookups::warn_of_whole(int64_t bucket, const char* reader) {
  const ShardedBucket& sharded = copies_[bucket];
  {
    const BucketCopies::Lock lock(copies_.mutex);
    const bool is_fetched = !copies_.cache(lock)[bucket].is_up_to_date() && !copies_.uses(lock).is_whole() &&
                            !copies_.is_over(lock) && !copies_.is_in_child();
    if (!is_fetched || sharded.rows->has_warned()) return;
  }
  TORCH_WARN("zerox: ", reader, " reads ", sharded.name, ", which is sharded by rows, and is no lookup of ",
             "nn.Embedding or nn.EmbeddingBag: so all of it is fetched, ",
             static_cast<double>(sharded.room->bytes()) / (1 << 20), " MiB. Nothing is wrong but what that takes. ",
             "This is said once of each table");
}

// What the lookup names is here, and may be read, until end().
void Lookups::pin_rows(int64_t bucket, const at::Tensor& indices, const char* reader) {
  const ShardedBucket& sharded = copies_[bucket];
  {
    const BucketCopies::Lock lock(copies_.mutex);
    copies_.uses(lock).pin(bucket);
    sharded.rows->begin_lookup();
    if (sharded.room != nullptr) sharded.room->let_ask(true);
    copies_.cache(lock).touch(bucket);
    const Copy& copy = copies_.cache(lock)[bucket];
    if (copy.is_up_to_date()) return;
    if (copy.state == Copy::State::released && sharded.rows->may_run(sharded.rows->missing(indices))) {
      sharded.room->let_write(false);
      return;
    }
  }
  const std::string failure = turns_.await(bucket, [&] { return turns_.bring_rows(bucket, indices, reader); });
  if (!failure.empty()) ReadGuard::raise_soon(failure);
}

void Lookups::end(int64_t bucket, BucketCopies::Locked lock) {
  const ShardedBucket& sharded = copies_[bucket];
  TableRows& rows = *sharded.rows;
  rows.end_lookup();
  copies_.uses(lock).unpin(bucket);
  if (sharded.room == nullptr) return;
  if (copies_.on_accelerator()) sharded.room->end_use();
  const Copy& copy = copies_.cache(lock)[bucket];
  const bool is_over = copy.state == Copy::State::released && !rows.is_looked_up();
  if (is_over && rows.has_pages()) rows.range().hide();
  if (copy.is_outdated() || !rows.has_pages()) copies_.changed.notify_all();
  if (!copies_.uses(lock).is_pinned(bucket)) sharded.room->let_ask(false);
  const bool goes_now = copies_.is_hostile() || (is_over && !rows.has_pages());
  if (goes_now) copies_.release_if_free(bucket, lock);
}

}  // namespace zx
