#include "residency/residency.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "check.h"
#include "locks.h"
#include "residency/unseen.h"

namespace zx {
namespace {

struct All {
  Mutex<LockRank::residencies> mutex;
  std::vector<std::weak_ptr<Residency>> made;
  std::vector<std::weak_ptr<Residents>> residents;
};

All& all() {
  static auto* const one = new All;
  return *one;
}

}  // namespace

Residency::Residency(std::shared_ptr<const PeerShards> peers, HiddenReads hidden)
    : residents_(std::make_shared<Residents>(std::move(peers), hidden)),
      guard_(std::in_place, Residents::watcher(residents_)) {}

void Residency::leave_to_params() {
  is_left_ = true;
  if (residents_ != nullptr) residents_->come_nowhere();
}

void Residency::list(const std::shared_ptr<Residency>& made) {
  const std::lock_guard lock(all().mutex);
  std::erase_if(all().made, [](const auto& each) { return each.expired(); });
  all().made.push_back(made);
  std::erase_if(all().residents, [](const auto& each) { return each.expired(); });
  all().residents.push_back(made->residents_);
}

bool Residency::is_any_awaited() {
  std::vector<std::shared_ptr<Residents>> living;  // destroyed without the lock
  {
    const std::lock_guard lock(all().mutex);
    for (const auto& each : all().residents) living.push_back(each.lock());
  }
  return std::any_of(living.begin(), living.end(),
                     [](const auto& each) { return each != nullptr && each->is_awaited(); });
}

// On any thread, whatever it is doing: while it traces code, or while the device's runtime goes.
Residency::~Residency() {
  if (residents_ == nullptr) return;
  const Unseen unseen;
  auto* const kept = new std::shared_ptr(residents_);
  try {
    let_shards_go();
    delete kept;
  } catch (const std::exception& error) {
    TORCH_WARN("zerox: what was kept of sharded parameters is not freed: ", reason_of(error));
  }
}

Residents* Residency::operator->() const {
  TORCH_CHECK(residents_ != nullptr,
              "zerox: optimizer.unshard() has let the shards go, with which parameters are updated: build a new "
              "optimizer, and give it this one's state_dict()");
  return residents_.get();
}

std::shared_ptr<Room> Residency::let(std::shared_ptr<Room> room) {
  room->leases().let_to(weak_from_this());
  return room;
}

std::shared_ptr<Room> Residency::make_room(size_t bytes, c10::Device device) {
  return let((*this)->make_room(bytes, device));
}

std::shared_ptr<Room> Residency::make_table_room(size_t bytes, c10::Device device) {
  return let((*this)->make_table_room(bytes, device));
}

std::shared_ptr<Residency> Residency::left_with(const at::Tensor& tensor) {
  std::vector<std::shared_ptr<Residency>> living;  // destroyed without the lock
  {
    const std::lock_guard lock(all().mutex);
    for (const auto& each : all().made) living.push_back(each.lock());
  }
  for (auto& each : living) {
    const bool is_here = each != nullptr && each->is_left_ && each->residents_ != nullptr;
    if (is_here && each->residents_->handover().bucket_of(tensor) >= 0) return each;
  }
  return nullptr;
}

int64_t Residency::take(Residency& from, int64_t bucket, std::string name, const std::vector<int64_t>& shard_starts,
                        bool is_served) {
  at::Tensor shard = from->handover().shard(bucket);
  std::shared_ptr<Room> room = from->handover().give(bucket);
  const auto before = room->leases().pass_to(shared_from_this());  // destroyed at the end
  return residents_->take(std::move(name), std::move(room), std::move(shard), shard_starts, is_served);
}

void Residency::let_shards_go() {
  residents_->stop_reading();
  guard_.reset();
  Residents::keep_for_others(std::exchange(residents_, {}));
}

}  // namespace zx
