// What keeps sharded parameters readable for as long as one of them is there.
#pragma once

#include <memory>
#include <utility>

namespace zx {

// Note [A model outlives its optimizer]
// What it takes to read sharded parameters belongs to them, and not to their optimizer: this rank's shards, which other
// ranks read too, the guard that tells of reads, and the server. Each tensor in a room has a share in the room's lease,
// which keeps all that: see Residency. So nothing is fetched where an optimizer is deleted. Its parameters are read as
// before, within the same limit, until the last tensor is gone. A new optimizer of the same parameters takes shards,
// rooms and leases over.
//
// A tensor may be let go of by any thread, at any time.
class Lease {
 public:
  explicit Lease(std::shared_ptr<const void> kept) : kept_(std::move(kept)) {}
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // By somebody who has a share. Returns what it kept before.
  std::shared_ptr<const void> keep(std::shared_ptr<const void> other) { return std::exchange(kept_, std::move(other)); }

  // While one lives, this thread may be the last that has a share, and holds locks that ends of leases take. What ends
  // meanwhile is kept until end_late() is called without any.
  class Postponed {
   public:
    Postponed();
    ~Postponed();
    Postponed(const Postponed&) = delete;
    Postponed& operator=(const Postponed&) = delete;
  };
  static void end_late();

 private:
  std::shared_ptr<const void> kept_;
};

// Of one room, whose tensors are made one at a time.
class Leases {
 public:
  // To be called before there is a tensor: what all of them are to keep.
  void let_to(std::weak_ptr<const void> owner) { owner_ = std::move(owner); }
  // Those that there are keep another one from now on. Returns what they kept.
  std::shared_ptr<const void> pass_to(const std::shared_ptr<const void>& owner) {
    owner_ = owner;
    const std::shared_ptr<Lease> lease = lease_.lock();
    return lease == nullptr ? nullptr : lease->keep(owner);
  }
  // For one more tensor: the room, with a share.
  template <class Room>
  std::shared_ptr<Room> let(std::shared_ptr<Room> room) {
    const auto kept = std::make_shared<std::pair<std::shared_ptr<Room>, std::shared_ptr<Lease>>>(room, share());
    return {kept, room.get()};
  }

 private:
  std::shared_ptr<Lease> share() {
    std::shared_ptr<Lease> lease = lease_.lock();
    if (lease == nullptr) lease_ = lease = std::make_shared<Lease>(owner_.lock());
    return lease;
  }

  std::weak_ptr<const void> owner_;
  std::weak_ptr<Lease> lease_;  // null while there is no tensor
};

}  // namespace zx
