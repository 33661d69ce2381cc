// Whether backward waits for what it has launched.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "grads/flights.h"

namespace zx {

// Note [Backward at the pace of the exchange]
// Gradients that have not left take memory, up to all of them if backward is faster than the exchange. Where memory is
// what counts (ZeRO stage 3), a backward that has launched a bucket waits until the one before it has been reduced. The
// wire stays busy meanwhile: one bucket is reduced while the next one's gradients are made. On an accelerator the host
// would run ahead of the device, and so of the wire, in the same way; but where the backend works on streams, what is
// launched has been reduced, as the host sees it, and streams wait for each other: see Note [Streams].
//
// A rank may be late by seconds, as where rank 0 saves or evaluates: the others wait for it. But it may also wait for
// what this rank does after its backward. If another rank has written parameters, it waits until this one writes them
// or comes to synchronize (Note [Shards are pulled]): then the rest of the pass goes on without waiting. Ranks may also
// run backwards of several optimizers in other orders, which nobody sees: so the pass goes on, too, if nothing is
// reduced for as long as a wait takes to be spoken of. A rank that follows the others launches nothing before they
// synchronize: there is no waiting at all then.

// Under Buckets::mutex, but for await().
class Pace {
 public:
  Pace(std::shared_ptr<Flights> flights, bool is_kept) : flights_(std::move(flights)), is_kept_(is_kept) {}

  // Whether some rank takes part only at a sync point, so that nothing is reduced before.
  void set_followed(bool followed) { is_followed_ = followed; }
  bool followed() const { return is_followed_; }

  void begin_pass() { is_kept_now_ = is_kept_ && !is_followed_; }
  bool is_kept_now() const { return is_kept_now_; }
  void give_up() { is_kept_now_ = false; }

  // `ends`: whether another rank is known to wait for what this one does after its backward. For all passes to come.
  void set_ends(std::function<bool()> ends) { patience_.ends = std::move(ends); }
  void set_most(std::chrono::milliseconds most) { patience_.most = most; }  // for tests

  // Waits for all but the last flight. Returns false if nothing is reduced, and the patience ends.
  bool await() const {
    constexpr int64_t kMostUnreduced = 1;
    return flights_->await_all_but(kMostUnreduced, patience_);
  }

 private:
  const std::shared_ptr<Flights> flights_;
  const bool is_kept_;
  bool is_followed_ = false;
  bool is_kept_now_ = false;  // in this pass
  Patience patience_{.most = std::chrono::seconds(60)};
};

}  // namespace zx
