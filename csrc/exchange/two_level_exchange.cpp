#include "exchange/two_level_exchange.h"

#include <deque>
#include <mutex>
#include <utility>

#include "locks.h"

namespace zx {

// The inner level of a gather can only begin when the outer one has arrived here. Ranks may wait for gathers in any
// order, but on each level messages pair up by order. So whoever waits for a gather begins the inner level of all that
// were started before it too.
struct TwoLevelExchange::Gathers {
  Mutex<LockRank::two_level_gathers> mutex;
  std::deque<std::shared_ptr<GatherPending>> begun{};  // those whose inner level has not begun, in the order of start
};

class TwoLevelExchange::GatherPending final : public Pending {
 public:
  GatherPending(Gathers& all, std::shared_ptr<Pending> outer, std::shared_ptr<Exchange> exchange, at::Tensor flat)
      : Pending(Communicator{}),
        all_(all),
        outer_(std::move(outer)),
        inner_exchange_(std::move(exchange)),
        flat_(std::move(flat)) {}

  void wait() override {
    begin_inner_of_all();
    inner_->wait();
  }

  void wait_for_readers() override {
    outer_->wait_for_readers();
    if (inner_) inner_->wait_for_readers();
  }

  void abort() override {
    outer_->abort();
    if (inner_) inner_->abort();
  }

 private:
  void begin_inner_of_all() {
    const std::lock_guard lock(all_.mutex);
    while (!inner_) {
      GatherPending& next = *all_.begun.front();
      next.outer_->wait();
      next.inner_ = next.inner_exchange_->gather(next.flat_);
      next.flat_.reset();
      all_.begun.pop_front();
    }
  }

  Gathers& all_;  // lives longer: see ~Gathers() in params/gathers.h, which waits for all
  std::shared_ptr<Pending> outer_;
  std::shared_ptr<Exchange> inner_exchange_;
  at::Tensor flat_;
  std::shared_ptr<Pending> inner_{};
};

TwoLevelExchange::TwoLevelExchange(std::shared_ptr<Exchange> inner, std::shared_ptr<Exchange> outer)
    : Exchange(inner->comm(), inner->rank() * outer->world() + outer->rank(), inner->world() * outer->world()),
      inner_(std::move(inner)),
      outer_(std::move(outer)),
      gathers_(std::make_unique<Gathers>()) {}

TwoLevelExchange::~TwoLevelExchange() = default;

std::vector<const Traffic*> TwoLevelExchange::traffic() const {
  return {inner_->traffic().front(), outer_->traffic().front()};
}

std::shared_ptr<Pending> TwoLevelExchange::gather(const at::Tensor& flat) {
  auto outer = outer_->gather(slice(flat, inner_->rank(), inner_->world()));
  auto pending = std::make_shared<GatherPending>(*gathers_, std::move(outer), inner_, flat);
  const std::lock_guard lock(gathers_->mutex);
  gathers_->begun.push_back(pending);
  return pending;
}

}  // namespace zx
