#include "bucket_manager/gathers.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>

#include "bucket_manager/ranges.h"
#include "check.h"

namespace zx {

Gathers::~Gathers() {
  try {
    finish();
  } catch (const std::exception&) {  // nobody is left to be told
  }
}

void Gathers::fail(const Gather& gather, const std::string& reason) const {
  TORCH_CHECK(false, "zerox: ", names_.what, " of ", gather.bucket->describe(),
              " did not arrive from all ranks: ", reason);
}

template <class Body>
void Gathers::naming(const Gather& gather, const Body& body) const {
  try {
    body();
  } catch (const std::exception& error) {
    fail(gather, reason_of(error));
  }
}

void Gathers::start(const std::shared_ptr<Bucket>& bucket, at::Tensor flat, Exchange& exchange, bool background) {
  if (under_way_.empty()) order_of_use_.clear();
  const Range range(names_.start, bucket->index);
  auto gather = std::make_shared<Gather>();
  gather->bucket = bucket;
  gather->flat = std::move(flat);
  naming(*gather, [&] { gather->pending = exchange.gather(gather->flat); });
  under_way_.push_back(gather);
  if (background && device_.is_cpu() && !hold_) lane_.post([this, gather] { take_in(*gather); });
}

void Gathers::take_in(Gather& gather) const {
  std::call_once(gather.once, [this, &gather] { receive(gather); });
}

// What goes wrong is kept, for everyone who waits.
void Gathers::receive(Gather& gather) const {
  const Range range(names_.wait, gather.bucket->index);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const ReadGuard::Pause ours;
  try {
    gather.pending->wait();
  } catch (const std::exception& error) {
    gather.error = reason_of(error);
  }
}

void Gathers::wait_on_stream(Gather& gather) const {
  const c10::Stream here = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  if (std::find(gather.waited.begin(), gather.waited.end(), here) != gather.waited.end()) return;
  gather.waited.push_back(here);
  receive(gather);
}

void Gathers::wait_for(Gather& gather) {
  if (device_.is_cpu()) take_in(gather);
  const std::lock_guard lock(mutex_);
  if (!gather.used) order_of_use_.push_back(gather.bucket->index);
  gather.used = true;
  if (!device_.is_cpu()) wait_on_stream(gather);
  if (!gather.error.empty()) fail(gather, gather.error);
}

void Gathers::wait(const std::vector<int64_t>& buckets) {
  for (const auto& gather : under_way_) {
    if (std::find(buckets.begin(), buckets.end(), gather->bucket->index) != buckets.end()) wait_for(*gather);
  }
  if (std::this_thread::get_id() == guarded_ && missing().empty()) guard_.reset();
}

void Gathers::guard_reads() {
  guarded_ = std::this_thread::get_id();
  guard_.emplace([this](const at::Tensor& tensor) { before_read(tensor); });
}

void Gathers::before_read(const at::Tensor& tensor) {
  if (tensor.device() != device_) return;
  for (const auto& gather : under_way_) {
    if (!tensor.storage().is_alias_of(gather->flat.storage())) continue;
    try {
      wait_for(*gather);
    } catch (const std::exception&) {  // an operator can't be stopped from here: finish() tells
    }
  }
}

void Gathers::finish() {
  guard_.reset();
  const auto all = std::move(under_way_);
  under_way_.clear();
  std::exception_ptr first;
  const auto attempt = [&first](const auto& body) {
    try {
      body();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  };
  const std::vector<int64_t> used = order_of_use_;
  for (const auto& gather : all) attempt([&] { wait_for(*gather); });
  order_of_use_ = used;
  for (const auto& gather : all) {
    if (!first) attempt([&] { naming(*gather, [&] { gather->pending->wait_for_readers(); }); });
  }
  if (first) std::rethrow_exception(first);
}

std::vector<int64_t> Gathers::missing() const {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> found;
  for (const auto& gather : under_way_) {
    if (!gather->used || !device_.is_cpu()) found.push_back(gather->bucket->index);
  }
  return found;
}

std::vector<int64_t> Gathers::order_of_use() const {
  const std::lock_guard lock(mutex_);
  return order_of_use_;
}

}  // namespace zx
