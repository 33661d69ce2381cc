// What step() does to sharded parameters, and the ends: of the optimizer, and in a forked child.
#include <c10/util/Exception.h>

#include <utility>

#include "residency/residents.h"

namespace zx {

void Residents::begin_update() {
  process_.check();
  std::unique_lock lock(mutex_);
  now_.updating = true;
  now_.updater = std::this_thread::get_id();
  changed_.wait(lock, [this] { return now_.num_fetching == 0; });
  for (const auto& sharded : buckets_) {
    if (now_.whole > 0) sharded->room->end_use();  // by who reads without operators
    sharded->room->begin_use();                    // the shard will be written, which was copied from
    const bool is_in_place = sharded->shard.const_data_ptr() == sharded->address;
    if (!is_in_place && now_.failure.empty()) {
      now_.failure = "zerox: this rank's shard of " + sharded->name +
                     " lies in other memory than when the optimizer was built, and other ranks would read the old one: "
                     "build the optimizer anew";
    }
  }
  lock.unlock();
  try {
    await_pulls();  // the others' will be written too
  } catch (...) {
    end_update(/*is_update=*/false, /*any_written=*/false);
    throw;
  }
}

void Residents::publish(int64_t bucket, const at::Tensor& rows) {
  const std::lock_guard lock(mutex_);
  ShardedBucket& sharded = *buckets_.at(bucket);
  sharded.room->serve(sharded.shard, sharded.served, rows);
  sharded.stamps.at(ShardStamp::version).store(now_.version + 1, std::memory_order_release);
  peers_->stamps_changed();
}

void Residents::end_update(bool is_update, bool any_written) {
  const std::lock_guard lock(mutex_);
  if (!now_.updating) return;
  if (is_update) {
    ++now_.version;
    past_.functions.forget_calls();
    past_.log.note(ResidencyEvent::Kind::step, -1, now_.resident_bytes);
    for (const auto& sharded : buckets_) {
      const bool is_published = sharded->stamps.get(ShardStamp::version) == now_.version;
      if (any_written && !is_published) sharded->room->serve(sharded->shard, sharded->served, {});
      sharded->stamps.at(ShardStamp::version).store(now_.version, std::memory_order_release);
      if (sharded->stays == Stays::lent) {
        sharded->stays = Stays::no;
        --sharded->pins;
        --sharded->writers;
      }
      if (may_be_released(*sharded)) {
        release(*sharded);
      } else {  // inside whole(), or an operator of another thread reads it
        sharded->is_old = sharded->state == State::resident;
        if (sharded->rows != nullptr) sharded->rows->forget();
      }
    }
    peers_->stamps_changed();
  }
  now_.updating = false;
  changed_.notify_all();
}

// ---- the end

void Residents::make_whole_for_good() {
  if (!process_.is_this()) return;
  {
    const std::lock_guard lock(mutex_);
    now_.ending = true;
  }
  enter_whole();
  await_pulls();
  {
    std::vector<at::Tensor> mapped;  // destroyed without the lock: tensors that Python knows need the GIL for it
    const std::lock_guard lock(mutex_);
    now_.forgotten = true;
    for (const auto& sharded : buckets_) {
      for (ShardPlace& place : sharded->places) mapped.push_back(std::exchange(place.mapped, {}));
    }
  }
  const std::lock_guard lock(mutex_);
  for (const auto& sharded : buckets_) sharded->stamps.at(ShardStamp::left) = 1;
  peers_->say_left();
  if (!now_.failure.empty()) TORCH_WARN(now_.failure, ". The optimizer was deleted without them");
}

void Residents::keep_for_others(const std::shared_ptr<Residents>& gone) {
  static auto* const kept = new std::vector<std::shared_ptr<Residents>>();  // leaked, with its lock
  static auto* const mutex = new std::mutex;
  if (gone != nullptr) remove_fault_reader(gone.get());  // all is whole, and stays
  if (gone != nullptr && gone->process_.is_this()) {
    const std::lock_guard lock(gone->mutex_);
    gone->snapshots_.push_back(std::make_unique<const std::vector<ByAddress>>());
    gone->by_address_ = gone->snapshots_.back().get();  // its addresses may be others' from now on
    for (const auto& sharded : gone->buckets_) {        // the parameters keep them
      sharded->room.reset();
      if (sharded->rows != nullptr) sharded->rows->let_go();
    }
  }
  std::vector<std::shared_ptr<Residents>> over;  // destroyed without the lock
  const std::lock_guard lock(*mutex);
  if (gone != nullptr) kept->push_back(gone);
  for (auto& each : *kept) {
    if (!each->is_read_by_others()) over.push_back(std::exchange(each, nullptr));
  }
  std::erase(*kept, nullptr);
}

bool Residents::is_read_by_others() const {
  if (!process_.is_this()) return true;  // nothing is destroyed there
  const std::lock_guard lock(mutex_);
  for (const auto& sharded : buckets_) {
    for (int rank = 0; rank < static_cast<int>(sharded->places.size()); ++rank) {
      if (rank != peers_->rank() && !peers_->has_left(rank, sharded->places[rank])) return true;
    }
  }
  return false;
}

// See Note [Forks]. An operator can't be stopped.
void Residents::in_child(ShardedBucket& sharded) {
  if (is_up_to_date(sharded)) {
    sharded.room->let_write(true);  // the child's own copy
    return;
  }
  sharded.state = State::resident;
  sharded.is_stale = sharded.is_old = false;
  sharded.room->restore_in_child();
  ReadGuard::raise_soon("zerox: the parameters of " + sharded.name +
                        " were released when this process was forked, and a child can't fetch them. Fork inside "
                        "optimizer.whole(), or give the child a copy of the model that was made there");
}

}  // namespace zx
