// Whether backward waits for what it has launched.
#pragma once

#include <algorithm>
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
// A rank may be late by seconds, as where rank 0 saves or evaluates. It may also have no backward in this step, and
// wait for what this rank does after its own: until it comes to synchronize, or writes parameters that the other has
// written (Note [Shards are pulled]). So if nothing is reduced for 2 seconds, the rest of the pass goes on without
// waiting. But where ranks read each other's memory they see what another one waits for, and wait up to a minute if it
// does not. Ranks may also run backwards of several optimizers in other orders, which nobody sees: that minute is lost
// once. A rank that follows the others launches nothing before they synchronize: there is no waiting at all then.

// Under Buckets::mutex, but for await().
class Pace {
 public:
  static constexpr std::chrono::milliseconds kLeast{2000};

  Pace(std::shared_ptr<Flights> flights, bool is_kept) : flights_(std::move(flights)), is_kept_(is_kept) {}

  // Whether some rank takes part only at a sync point, so that nothing is reduced before.
  void set_followed(bool followed) { is_followed_ = followed; }
  bool followed() const { return is_followed_; }

  void begin_pass() { is_kept_now_ = is_kept_ && !is_followed_; }
  bool is_kept_now() const { return is_kept_now_; }

  // In all passes to come: waits so long, unless another rank `ends` it.
  void wait_longer(std::chrono::milliseconds most, std::function<bool()> ends) {
    patience_ = {std::min(kLeast, most), most, std::move(ends)};
  }

  // Waits for all but the last flight.
  WaitEnd await() const {
    constexpr int64_t kMostUnreduced = 1;
    return flights_->await_all_but(kMostUnreduced, patience_);
  }
  void note(WaitEnd awaited) {
    if (awaited == WaitEnd::few) return;
    is_kept_now_ = false;
    if (awaited == WaitEnd::too_long) patience_.most = patience_.least;  // it may well be so in each pass
  }

 private:
  const std::shared_ptr<Flights> flights_;
  const bool is_kept_;
  bool is_followed_ = false;
  bool is_kept_now_ = false;  // in this pass
  Patience patience_{kLeast};
};

}  // namespace zx
