#include "params/gathers.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "buckets/address.h"

namespace zx {
namespace {

std::vector<int64_t> in_order_of_use(std::vector<std::shared_ptr<Gather>> gathers) {
  std::erase_if(gathers, [](const auto& gather) { return gather->first_wait() == 0; });
  std::sort(gathers.begin(), gathers.end(),
            [](const auto& a, const auto& b) { return a->first_wait() < b->first_wait(); });
  std::vector<int64_t> buckets;
  for (const auto& gather : gathers) buckets.push_back(gather->bucket());
  return buckets;
}

// An operator can't be stopped from here: errors are left to wait() and finish().
class Waits final : public ReadGuard::Watcher {
 public:
  Waits(std::vector<std::shared_ptr<Gather>> gathers, std::shared_ptr<Stopwatch> waited)
      : gathers_(std::move(gathers)), waited_(std::move(waited)) {
    for (const auto& gather : gathers_) {
      by_address_.emplace_back(static_cast<const char*>(gather->flat().const_data_ptr()), gather.get());
    }
    std::sort(by_address_.begin(), by_address_.end());
  }

  void before_read(const at::Tensor& tensor, const ReadGuard::Use& use) override {
    Gather* gather = that_fills(tensor);
    if (gather == nullptr || gather->is_over() || !may_wait_for(*gather)) return;
    ReadGuard::without_gil([&] {
      if (wait_for(*gather, /*is_use=*/true) && gather->on_host() && use.is_write()) gather->give();
    });
  }

  // These waits are not known to be uses: reads that are shown later tell in which order gathers are needed.
  void before_hidden_reads(const char* /*reader*/, ReadGuard::Pins& /*pins*/) override {
    for (const auto& gather : gathers_) {
      if (may_wait_for(*gather) && wait_for(*gather, /*is_use=*/false) && gather->on_host()) gather->give();
    }
  }

  bool has_seen_enough() const override {
    return std::all_of(gathers_.begin(), gathers_.end(), [](const auto& gather) { return gather->is_over(); });
  }

  void before_fork() override {
    if (!process_.is_this()) return;  // a child that forks: nothing will arrive there
    for (const auto& gather : gathers_) {
      if (gather->on_host()) gather->take_in();
    }
  }

  bool has_arrived() const override {
    return std::all_of(gathers_.begin(), gathers_.end(),
                       [](const auto& gather) { return !gather->on_host() || gather->has_arrived(); });
  }

 private:
  // Nothing may wait in a forked child. An operator can't be stopped there either, so a warning is all that is
  // possible.
  bool may_wait_for(const Gather& gather) const {
    if (process_.is_this()) return true;
    if (!gather.has_arrived()) {
      TORCH_WARN_ONCE("zerox: an operator reads the updated parameters of ", gather.describe(),
                      ", which were on their way when this process was forked: their values are partly old. Call "
                      "optimizer.synchronize() before such a fork");
    }
    return false;
  }

  // The gather that fills this tensor's memory, or null. This is asked for each argument of each operator. Addresses
  // tell: see Note [Every parameter has a storage of its own].
  Gather* that_fills(const at::Tensor& tensor) const {
    const auto* place = static_cast<const char*>(data_ptr_of(tensor).get());
    const auto after = std::upper_bound(by_address_.begin(), by_address_.end(), place,
                                        [](const char* address, const auto& each) { return address < each.first; });
    if (after == by_address_.begin()) return nullptr;
    const auto& [start, gather] = *std::prev(after);
    const at::Tensor& flat = gather->flat();
    return place < start + flat.nbytes() && tensor.device() == flat.device() ? gather : nullptr;
  }

  bool wait_for(Gather& gather, bool is_use) const {
    const Stopwatch::Lap lap(*waited_);
    try {
      gather.wait(is_use);
    } catch (const std::exception&) {
      return false;
    }
    return true;
  }

  Process process_;
  // In the order in which they started: if ranks waited in different orders, they could wait for each other forever.
  std::vector<std::shared_ptr<Gather>> gathers_;
  std::shared_ptr<Stopwatch> waited_;
  std::vector<std::pair<const char*, Gather*>> by_address_;
};

}  // namespace

Gathers::~Gathers() {
  try {
    finish();
  } catch (const std::exception&) {  // no caller is left to be told
  }
}

Gathers::All Gathers::under_way() const {
  std::unique_lock lock(mutex_, std::defer_lock);
  if (process_.is_this()) {
    lock.lock();
  } else {  // the thread that holds it is not here: see Note [Forks]
    TORCH_CHECK(lock.try_lock(),
                "zerox: another thread was inside step() when this process was forked, and what is "
                "whole can't be known. Fork between steps");
  }
  return under_way_;
}

void Gathers::in_background(void (Gather::*what)(), const std::shared_ptr<Gather>& gather) {
  if (gather->on_host() && !is_held_back_) worker_.post([what, gather] { ((*gather).*what)(); });
}

void Gathers::start(const std::shared_ptr<Bucket>& bucket, at::Tensor flat, at::IntArrayRef starts, Exchange& exchange,
                    bool background) {
  process_.check();
  const Stopwatch::Lap lap(*waited_);
  const auto gather = std::make_shared<Gather>(names_, bucket, std::move(flat), starts, exchange);
  if (!gather->is_under_way()) return;
  {
    const std::lock_guard lock(mutex_);
    if (under_way_.empty()) used_.clear();
    under_way_.push_back(gather);
  }
  if (background) in_background(&Gather::take_in, gather);
}

void Gathers::wait(const std::vector<int64_t>& buckets) {
  const Stopwatch::Lap lap(*waited_);
  for (const auto& gather : under_way()) {
    if (std::find(buckets.begin(), buckets.end(), gather->bucket()) == buckets.end()) continue;
    if (process_.is_this()) {
      gather->wait();
    } else {
      gather->check_arrived();
    }
  }
}

void Gathers::guard_reads() {
  const All all = under_way();
  guard_.emplace(std::make_shared<Waits>(all, waited_));
  for (const auto& gather : all) in_background(&Gather::give, gather);
}

void Gathers::finish() {
  process_.check();
  const Stopwatch::Lap lap(*waited_);
  std::exception_ptr first;
  const auto attempt = [&first](const auto& body) {
    try {
      body();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  };
  const All all = under_way();
  std::vector<int64_t> used = in_order_of_use(all);
  for (const auto& gather : all) attempt([&] { gather->wait(); });
  for (const auto& gather : all) {
    if (!first) attempt([&] { gather->wait_for_readers(); });
  }
  if (first) std::rethrow_exception(first);
  guard_.reset();
  All over;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  over.swap(under_way_);
  used_ = std::move(used);
}

std::vector<int64_t> Gathers::missing() const {
  std::vector<int64_t> found;
  for (const auto& gather : under_way()) {
    if (gather->first_wait() == 0 || !gather->on_host()) found.push_back(gather->bucket());
  }
  return found;
}

std::vector<int64_t> Gathers::order_of_use() const {
  const std::lock_guard lock(mutex_);
  return under_way_.empty() ? used_ : in_order_of_use(under_way_);
}

}  // namespace zx
