#include "bucket_manager/gathers.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <iterator>

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
  const Range range(names_.start, bucket->index);
  auto gather = std::make_shared<Gather>();
  gather->bucket = bucket;
  gather->flat = std::move(flat);
  naming(*gather, [&] { gather->pending = exchange.gather(gather->flat); });
  {
    const std::lock_guard lock(mutex_);
    if (under_way_.empty()) order_of_use_.clear();
    under_way_.push_back(gather);
  }
  if (background && device_.is_cpu() && !hold_) lane_.post([this, gather] { take_in(*gather); });
}

void Gathers::take_in(Gather& gather) const {
  std::call_once(gather.once, [this, &gather] { receive(gather); });
}

// See Note [Neighbours read late].
void Gathers::give(Gather& gather) const {
  take_in(gather);  // others may wait for this rank to have read theirs
  std::call_once(gather.given_once, [&gather] {
    try {
      gather.pending->wait_for_readers();
    } catch (const std::exception& error) {
      gather.given_error = reason_of(error);
    }
    gather.given = true;
  });
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

// Where operators are not looked at, the others' parameters may be read too.
void Gathers::wait(const std::vector<int64_t>& buckets) {
  std::vector<std::shared_ptr<Gather>> wanted;
  bool guarded = false;
  {
    const std::lock_guard lock(mutex_);
    guarded = std::this_thread::get_id() == guarded_;
    std::copy_if(under_way_.begin(), under_way_.end(), std::back_inserter(wanted), [&](const auto& gather) {
      return !guarded || std::find(buckets.begin(), buckets.end(), gather->bucket->index) != buckets.end();
    });
  }
  for (const auto& gather : wanted) wait_for(*gather);
  // Autograd puts a thread's callbacks back as they were when a node began: none must go inside one.
  if (guarded && torch::autograd::get_current_graph_task_id() == -1 && all_done()) guard_.reset();
}

bool Gathers::all_done() const {
  const std::lock_guard lock(mutex_);
  return device_.is_cpu() && std::all_of(under_way_.begin(), under_way_.end(),
                                         [](const auto& gather) { return gather->used && gather->given; });
}

void Gathers::guard_reads() {
  std::vector<std::shared_ptr<Gather>> all;
  {
    const std::lock_guard lock(mutex_);
    guarded_ = std::this_thread::get_id();
    all = under_way_;
  }
  guard_.emplace([this](const at::Tensor& tensor, const ReadGuard::Use& use) { before_read(tensor, use); });
  if (!device_.is_cpu() || hold_) return;
  for (const auto& gather : all) lane_.post([this, gather] { give(*gather); });
}

void Gathers::before_read(const at::Tensor& tensor, const ReadGuard::Use& use) {
  if (tensor.device() != device_) return;
  std::shared_ptr<Gather> found;
  {
    const std::lock_guard lock(mutex_);
    const auto it = std::find_if(under_way_.begin(), under_way_.end(), [&tensor](const auto& gather) {
      return tensor.storage().is_alias_of(gather->flat.storage());
    });
    if (it == under_way_.end()) return;
    found = *it;
  }
  try {
    wait_for(*found);
    if (device_.is_cpu() && !found->given && use.is_write()) give(*found);
  } catch (const std::exception&) {  // an operator can't be stopped from here: finish() tells
  }
}

void Gathers::finish() {
  guard_.reset();
  std::vector<std::shared_ptr<Gather>> all;
  std::vector<int64_t> used;
  {
    const std::lock_guard lock(mutex_);
    all = under_way_;
    used = order_of_use_;
  }
  std::exception_ptr first;
  const auto attempt = [&first](const auto& body) {
    try {
      body();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  };
  for (const auto& gather : all) attempt([&] { wait_for(*gather); });
  for (const auto& gather : all) {
    if (first) break;
    attempt([&] {
      if (device_.is_cpu()) {
        give(*gather);
        if (!gather->given_error.empty()) fail(*gather, gather->given_error);
      } else {
        naming(*gather, [&] { gather->pending->wait_for_readers(); });
      }
    });
  }
  {  // not before: others may be waiting for them, too
    const std::lock_guard lock(mutex_);
    under_way_.clear();
    order_of_use_ = used;
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
