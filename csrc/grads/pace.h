// Whether backward waits for what it has launched.
#pragma once

#include <chrono>
#include <cstdint>
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
// Ranks may run backwards of several optimizers in other orders, and would then wait for each other. So if nothing
// is reduced for a while, the rest of the pass goes on without waiting. A rank that follows the others launches nothing
// before they synchronize: there is no waiting at all then.

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

  // Waits for all but the last flight. Returns false if nothing is reduced for a while.
  bool await() const {
    constexpr int64_t kMostUnreduced = 1;
    constexpr std::chrono::milliseconds kPatience{2000};
    return flights_->await_all_but(kMostUnreduced, kPatience);
  }

 private:
  const std::shared_ptr<Flights> flights_;
  const bool is_kept_;
  bool is_followed_ = false;
  bool is_kept_now_ = false;  // in this pass
};

}  // namespace zx
