#include "params/gather.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "check.h"
#include "locks.h"
#include "params/read_guard.h"
#include "torch_internals.h"
#include "workers/ranges.h"

namespace zx {
namespace {

// Runs `body`. Returns the reason if it throws, else an empty string.
template <class Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return reason_of(error);
  }
  return "";
}

}  // namespace

Gather::Gather(GatherNames names, std::shared_ptr<Bucket> bucket, at::Tensor flat, at::IntArrayRef starts,
               Exchange& exchange)
    : names_(names), bucket_(std::move(bucket)), flat_(std::move(flat)) {
  const Range range(names_.start, bucket_->index);
  const Doing doing([this] { return doing_what(); }, /*per_batch=*/true);
  const std::string error = error_of([&] { pending_ = exchange.gather(flat_, starts); });
  if (!error.empty()) fail(error);
}

std::string Gather::doing_what() const {
  return std::string("the exchange of ") + names_.what + " of " + bucket_->describe();
}

void Gather::fail(const std::string& reason) const {
  TORCH_CHECK(false, "zerox: ", names_.what, " of ", bucket_->describe(), " did not arrive from all ranks: ", reason);
}

void Gather::wait(bool is_use) {
  static std::atomic<int64_t> waits{0};
  std::unique_lock lock(mutex_, std::defer_lock);
  if (on_host()) {
    take_in();
  } else {
    lock.lock();
    wait_on_stream();
  }
  int64_t never = 0;
  if (is_use && first_wait_ == 0) first_wait_.compare_exchange_strong(never, ++waits);
  if (!error_.empty()) fail(error_);
}

void Gather::take_in() {
  check_may_wait("a gather");
  std::call_once(taken_in_, [this] { receive(); });
}

// Called under the lock.
void Gather::wait_on_stream() {
  const c10::Stream here = internals::current_stream(flat_.device());
  if (!error_.empty() || std::find(waited_.begin(), waited_.end(), here) != waited_.end()) return;
  receive();
  waited_.push_back(here);
}

// Keeps an error, for all that wait.
void Gather::receive() {
  const Range range(names_.wait, bucket_->index);
  const Doing doing([this] { return doing_what(); }, /*per_batch=*/true);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const ReadGuard::Pause ours;
  error_ = error_of([this] { pending_->wait(); });
  if (arrival_ == Arrival::on_its_way) arrival_ = Arrival::taken_in;
}

void Gather::check_arrived() const {
  if (arrival_ == Arrival::on_its_way) {
    fail("they were on their way when this process was forked. Call optimizer.synchronize() before such a fork");
  }
  if (!error_.empty()) fail(error_);
}

// See Note [Neighbours read late].
void Gather::give() {
  check_may_wait("a gather");
  const Doing doing([this] { return doing_what(); }, /*per_batch=*/true);
  take_in();  // other ranks may be waiting for this rank to read theirs
  std::call_once(given_once_, [this] {
    given_error_ = error_.empty() ? error_of([this] { pending_->wait_for_readers(); }) : error_;
    arrival_ = Arrival::given;
  });
}

void Gather::wait_for_readers() {
  const Doing doing([this] { return doing_what(); }, /*per_batch=*/true);
  if (on_host()) {
    give();
  } else {
    given_error_ = error_of([this] { pending_->wait_for_readers(); });
  }
  if (!given_error_.empty()) fail(given_error_);
}

}  // namespace zx
