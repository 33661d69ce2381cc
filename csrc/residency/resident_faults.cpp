// Reads and writes of sharded parameters that are no operator's, or go on after it.
#include "residency/residents.h"

namespace zx {

// Its messages go on when the operator is over: if memory went away under them, gloo would end the process. So the
// bucket stays as it is until the next step(), and the caller raises.
void Residents::refuse_collective(ShardedBucket& sharded) {
  {
    const std::lock_guard lock(mutex_);
    if (now_.whole > 0 || sharded.places.empty() || now_.forgotten) return;
    if (sharded.stays != Stays::lent) {
      sharded.stays = Stays::lent;
      ++sharded.pins;
      if (sharded.writers++ == 0) sharded.room->let_write(true);
    }
  }
  ReadGuard::raise_soon("zerox: a collective of torch.distributed was called on parameters of " + sharded.name +
                        ", which are sharded: call it inside optimizer.whole()");
}

// See Note [Reads that nothing announces]. The bucket stays until others need its room: if the reader is not through
// then, it comes here again.
bool Residents::access_at(const void* address, bool is_write) {
  const int64_t bucket = bucket_at(address);
  if (bucket < 0) return false;
  const ReadGuard::Pause pause;
  if (!process_.is_this()) {
    in_child(*buckets_[bucket]);
    return true;
  }
  if (buckets_[bucket]->rows != nullptr) warn_of_whole(*buckets_[bucket], "code without an operator");
  std::unique_lock lock(mutex_);
  ShardedBucket& sharded = *buckets_[bucket];
  ++sharded.pins;
  sharded.touched = ++now_.clock;
  ++now_.counts.faults;
  if (sharded.rows == nullptr) past_.script.note(bucket);
  now_.counts.waits += is_up_to_date(sharded) ? 0 : 1;
  std::string failure;
  const auto fetch_it = [&] { failure = fetch_now(sharded, lock, "code without an operator"); };
  const bool waits = sharded.state == State::arriving || now_.updating || sharded.is_stale || sharded.is_old;
  if (waits) {  // for another thread, which may need the GIL
    lock.unlock();
    ReadGuard::without_gil([&] {
      lock.lock();
      fetch_it();
      lock.unlock();
    });
    lock.lock();
  } else {
    fetch_it();
  }
  --sharded.pins;
  if (is_write) {
    sharded.room->let_write(true);
    if (!sharded.places.empty() && !now_.forgotten && failure.empty()) {
      failure = "zerox: parameters of " + sharded.name +
                " were written without an operator (through numpy, or from a file), and such a write is lost when they "
                "are released: write inside optimizer.whole()";
    }
  }
  lock.unlock();
  if (failure.empty() || ReadGuard::raise_soon(failure)) return true;
  lock.lock();  // no thread of Python's: step() raises
  if (now_.failure.empty()) now_.failure = failure;
  return true;
}

}  // namespace zx
