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

}  // namespace zx
