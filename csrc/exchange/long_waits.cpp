#include "exchange/long_waits.h"

#include <ATen/ops/zeros.h>

#include <thread>
#include <vector>

#include "exchange/tags.h"

namespace zx {
namespace {

constexpr std::chrono::milliseconds kLongWait{1000};

}  // namespace

class LongWaits::Listed {
 public:
  Listed(LongWaits& waits, Wait& wait) : waits_(waits), wait_(wait) {
    const std::lock_guard lock(waits_.mutex_);
    if (!waits_.has_thread_) std::thread([&waits] { waits.watch(); }).detach();
    waits_.has_thread_ = true;
    waits_.waits_.insert(&wait_);
  }
  ~Listed() {
    const std::lock_guard lock(waits_.mutex_);
    waits_.waits_.erase(&wait_);
  }
  Listed(const Listed&) = delete;

 private:
  LongWaits& waits_;
  Wait& wait_;
};

LongWaits& LongWaits::all() {
  static auto* waits = new LongWaits;
  return *waits;
}

bool LongWaits::wait_for(c10d::ProcessGroup& group, const Awaited& awaited) {
  Wait wait{group, awaited};
  const Listed listed(*this, wait);
  if (awaited.work->wait()) return true;
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!wait.is_lost, "Connection closed by peer in the middle of a message");
  return false;
}

void LongWaits::watch() {
  while (true) {
    std::this_thread::sleep_for(kLongWait);
    const std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    for (Wait* wait : waits_) {
      if (now - wait->start < kLongWait || wait->is_lost || is_connected(*wait)) continue;
      wait->is_lost = true;
      wait->awaited.work->abort();
    }
  }
}

bool LongWaits::is_connected(const Wait& wait) {
  std::vector<at::Tensor> message{at::zeros({1}, at::kByte)};
  try {
    wait.group.send(message, wait.awaited.peer, kTagsEnd);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

}  // namespace zx
