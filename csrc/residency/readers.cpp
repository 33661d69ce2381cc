#include "residency/readers.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "buckets/address.h"
#include "residency/device_room.h"
#include "torch_internals.h"

namespace zx {
namespace {

constexpr const char* kNoOperator = "code without an operator";

void sort_and_thin(std::vector<int64_t>& buckets) {
  std::sort(buckets.begin(), buckets.end());
  buckets.erase(std::unique(buckets.begin(), buckets.end()), buckets.end());
}

}  // namespace

// ---- where buckets lie

void Readers::watch_added() {
  bool faults = false;
  {
    const BucketCopies::Lock lock(copies_.mutex);
    std::vector<AddressMap::Range> ranges;
    for (int64_t bucket = 0; bucket < copies_.size(lock); ++bucket) {
      const auto* range = dynamic_cast<const AddressRange*>(copies_[bucket].room.get());  // null if it was given away
      if (range != nullptr) ranges.push_back({range->data(), range->data() + range->bytes(), bucket});
    }
    faults = !ranges.empty() && copies_.hidden_reads_fault();
    addresses_.replace(std::move(ranges));
  }
  if (faults) add_fault_reader(this);
}

void Readers::forget_addresses() {
  const BucketCopies::Lock lock(copies_.mutex);
  addresses_.replace({});
}

void Readers::forget_addresses_of(const Room& room, BucketCopies::Locked /*lock*/) {
  if (!copies_.on_accelerator()) addresses_.forget(room.address());
}

int64_t Readers::bucket_of(const at::Tensor& tensor) const {
  const int64_t bucket = place_of(tensor);
  return bucket >= 0 && copies_[bucket].is_filled() ? bucket : -1;
}

int64_t Readers::place_of(const at::Tensor& tensor) const {
  if (tensor.is_cpu()) return addresses_.at(data_ptr_of(tensor).get());
  const auto room = DeviceRoom::of(tensor);
  if (room == nullptr) return -1;
  const BucketCopies::Lock lock(copies_.mutex);
  return copies_.has(room->index(), room, lock) ? room->index() : -1;
}

// ---- before operators

void Readers::before_read(const at::Tensor& tensor, const ReadGuard::Use& use) {
  const int64_t bucket = bucket_of(tensor);
  if (bucket < 0 || std::strcmp(use.name(), internals::kSetsData) == 0) return;
  if (copies_[bucket].rows != nullptr && lookups_.begin(bucket, tensor, use)) return;
  pin_here(bucket, use.name());
  const bool is_collective = internals::begins_with(use.name(), internals::kCollective);
  if (use.pin(bucket, tensor, /*to_read=*/is_collective)) let_write(bucket);
  if (is_collective) refuse_collective(bucket);
}

void Readers::before_hidden_reads(const char* reader, ReadGuard::Pins& pins) {
  if (copies_.hidden_reads_fault()) return;
  int64_t count = 0;
  {
    const BucketCopies::Lock lock(copies_.mutex);
    if (!copies_.is_over(lock)) count = copies_.size(lock);
  }
  for (int64_t bucket = 0; bucket < count; ++bucket) {
    if (copies_[bucket].is_filled()) pin_for(bucket, reader, pins);
  }
}

void Readers::before_function(const ReadGuard::PythonFunction& function, const ReadGuard::Pins& reads) {
  if (copies_.is_in_child()) return;
  std::vector<int64_t> buckets;
  for (const auto& pin : reads) buckets.push_back(pin.what);
  sort_and_thin(buckets);
  const BucketCopies::Lock lock(copies_.mutex);
  functions_.note(function.name, {function.thread, function.number}, std::move(buckets));
}

void Readers::before_backward_of(const ReadGuard::PythonFunction& function, ReadGuard::Pins& pins) {
  std::vector<int64_t> buckets;
  if (!copies_.is_in_child()) {
    const BucketCopies::Lock lock(copies_.mutex);
    buckets = functions_.read_by(function.name, {function.thread, function.number});
  }
  for (const int64_t bucket : buckets) pin_for(bucket, function.name.c_str(), pins);
}

void Readers::forget_calls() {
  const BucketCopies::Lock lock(copies_.mutex);
  functions_.forget_calls();
}

size_t Readers::num_calls() const {
  const BucketCopies::Lock lock(copies_.mutex);
  return functions_.num_calls();
}

// For a reader that does not say whether it writes.
void Readers::pin_for(int64_t bucket, const char* reader, ReadGuard::Pins& pins) {
  pin_here(bucket, reader);
  pins.push_back({.what = bucket});
}

// For an operator that this thread is in, on its current stream.
void Readers::pin_here(int64_t bucket, const char* reader) {
  pin(bucket, reader);
  copies_.uses_here().note_here(bucket);
  copies_.begin_use(bucket);
}

void Readers::pin(int64_t bucket, const char* reader) {
  if (copies_.is_in_child()) {
    copies_.restore_in_child(bucket);
    return;
  }
  {
    const BucketCopies::Lock lock(copies_.mutex);
    const ShardedBucket& sharded = copies_[bucket];
    copies_.uses(lock).pin(bucket);
    if (sharded.room != nullptr) sharded.room->let_ask(true);
    Cache& cache = copies_.cache(lock);
    cache.touch(bucket);
    if (reader != nullptr && sharded.rows == nullptr && cache.note_read(bucket)) turns_.look_ahead(lock);
    if (cache[bucket].is_up_to_date()) return;
  }
  const std::string failure = turns_.await(bucket, [&] { return turns_.bring(bucket, reader); });
  if (!failure.empty() && reader != nullptr) ReadGuard::raise_soon(failure);
}

void Readers::let_write(int64_t bucket) {
  if (copies_.is_in_child()) return;
  const BucketCopies::Lock lock(copies_.mutex);
  Uses& uses = copies_.uses(lock);
  const auto& room = copies_[bucket].room;
  if (uses.begin_write(bucket) && !uses.is_whole() && room != nullptr) room->let_write(true);
}

// Its messages go on when the operator is over: if memory went away under them, gloo would end the process. So the
// bucket stays as it is until the next step(), and the caller raises.
void Readers::refuse_collective(int64_t bucket) {
  const ShardedBucket& sharded = copies_[bucket];
  {
    const BucketCopies::Lock lock(copies_.mutex);
    Uses& uses = copies_.uses(lock);
    if (uses.is_whole() || sharded.places.empty() || copies_.is_over(lock)) return;
    if (uses.stays(bucket) == Stays::no && uses.lend(bucket)) sharded.room->let_write(true);
  }
  ReadGuard::raise_soon("zerox: a collective of torch.distributed was called on parameters of " + sharded.name +
                        ", which are sharded: call it inside optimizer.whole()");
}

// ---- after operators

void Readers::after_operator(const ReadGuard::Pins& pins) {
  if (copies_.is_in_child()) return;
  std::vector<int64_t> written;
  for (const auto& pin : pins) {
    if (pin.was_written) written.push_back(pin.what);
  }
  sort_and_thin(written);
  if (!written.empty()) publisher_.take_over(written);
  for (const auto& pin : pins) copies_.uses_here().forget_here(pin.what);
  const BucketCopies::Lock lock(copies_.mutex);
  for (const auto& pin : pins) {
    if (Uses::is_lookup(pin.what)) {
      lookups_.end(Uses::bucket_of(pin.what), lock);
    } else {
      end_use(pin, lock);
    }
  }
  if (copies_.cache(lock).is_full(0)) copies_.make_space(0, nullptr, lock);
}

void Readers::end_use(const ReadGuard::Pin& pin, BucketCopies::Locked lock) {
  const int64_t bucket = pin.what;
  const ShardedBucket& sharded = copies_[bucket];
  Uses& uses = copies_.uses(lock);
  const Copy& copy = copies_.cache(lock)[bucket];
  if (sharded.room != nullptr) sharded.room->end_use();
  uses.unpin(bucket);
  const bool was_last_writer = pin.may_write && uses.end_write(bucket);
  if (was_last_writer && copy.state == Copy::State::resident && !copies_.is_over(lock)) {
    copies_.forbid_writes(bucket, lock);
  }
  if (copy.is_outdated()) copies_.changed.notify_all();
  if (copies_.is_hostile()) copies_.release_if_free(bucket, lock);
  if (!uses.is_pinned(bucket) && sharded.room != nullptr) sharded.room->let_ask(false);
}

// ---- without operators

// See Note [Reads that nothing announces]. The bucket stays until others need its room: if the reader is not through
// then, it comes here again.
bool Readers::access_at(const void* address, bool is_write) {
  const int64_t bucket = addresses_.at(address);
  if (bucket < 0 || !copies_[bucket].is_filled()) return false;
  const ReadGuard::Pause pause;
  if (copies_.is_in_child()) {
    copies_.restore_in_child(bucket);
    return true;
  }
  if (copies_[bucket].rows != nullptr) lookups_.warn_of_whole(bucket, kNoOperator);
  std::string failure = bring_at_fault(bucket);
  {
    const BucketCopies::Lock lock(copies_.mutex);
    copies_.uses(lock).unpin(bucket);
    const std::string lost = is_write ? let_write_be_lost(bucket, lock) : "";
    if (failure.empty()) failure = lost;
  }
  if (failure.empty() || ReadGuard::raise_soon(failure)) return true;
  TORCH_WARN(failure);  // no thread of Python's: step() raises, if there is an optimizer
  const BucketCopies::Lock lock(copies_.mutex);
  copies_.report(lock).fail(failure);
  return true;
}

// Pins the bucket.
std::string Readers::bring_at_fault(int64_t bucket) {
  std::optional<Turns::Turn> turn;
  {
    const BucketCopies::Lock lock(copies_.mutex);
    Cache& cache = copies_.cache(lock);
    copies_.uses(lock).pin(bucket);
    cache.touch(bucket);
    if (!cache[bucket].is_table) cache.note_read(bucket);
    ResidentCounts& counts = copies_.report(lock).counts();
    ++counts.faults;
    counts.waits += cache[bucket].is_up_to_date() ? 0 : 1;
    turn = turns_.begin_at_once(bucket, kNoOperator, lock);
  }
  if (turn) return turns_.finish(bucket, *turn);
  std::string failure;
  ReadGuard::without_gil([&] { failure = turns_.bring(bucket, kNoOperator); });  // another thread may need it
  return failure;
}

// Returns what is to be raised.
std::string Readers::let_write_be_lost(int64_t bucket, BucketCopies::Locked lock) {
  const ShardedBucket& sharded = copies_[bucket];
  if (sharded.room != nullptr) sharded.room->let_write(true);
  if (sharded.room == nullptr || sharded.places.empty() || copies_.is_over(lock)) return "";
  return "zerox: parameters of " + sharded.name +
         " were written without an operator (through numpy, or from a file), and such a write is lost when they "
         "are released: write inside optimizer.whole()";
}

}  // namespace zx
