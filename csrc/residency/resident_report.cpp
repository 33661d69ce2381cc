// What the residents say of themselves.
#include <utility>

#include "residency/residents.h"

namespace zx {

ResidentCounts Residents::counts() const {
  const std::lock_guard lock(mutex_);
  return now_.counts;
}

void Residents::record(bool on) {
  const std::lock_guard lock(mutex_);
  past_.log.set_recording(on);
}

std::vector<ResidencyEvent> Residents::take_events() {
  const std::lock_guard lock(mutex_);
  return past_.log.take();
}

size_t Residents::resident_bytes() const {
  const std::lock_guard lock(mutex_);
  return now_.resident_bytes;
}

size_t Residents::take_most_bytes() {
  const std::lock_guard lock(mutex_);
  return std::exchange(now_.most_bytes, now_.resident_bytes);
}

size_t Residents::room_bytes() const {
  const std::lock_guard lock(mutex_);
  return now_.resident_bytes + rooms_.spare().bytes();
}

size_t Residents::served_bytes() const {
  const std::lock_guard lock(mutex_);
  size_t bytes = 0;
  for (const auto& sharded : buckets_) {
    if (sharded->served.defined() && !sharded->served.is_same(sharded->shard)) bytes += sharded->served.nbytes();
  }
  return bytes;
}

std::vector<bool> Residents::resident() const {
  const std::lock_guard lock(mutex_);
  std::vector<bool> found;
  for (const auto& sharded : buckets_) found.push_back(sharded->state == State::resident);
  return found;
}

size_t Residents::num_calls() const {
  const std::lock_guard lock(mutex_);
  return past_.functions.num_calls();
}

}  // namespace zx
