#include "exchange/two_level_exchange.h"

#include <deque>
#include <mutex>
#include <utility>

#include "locks.h"

namespace zx {

std::vector<int64_t> starts_of_columns(at::IntArrayRef starts, int64_t outer_world) {
  std::vector<int64_t> found;
  for (size_t rank = 0; rank < starts.size(); rank += outer_world) found.push_back(starts[rank]);
  return found;
}

at::IntArrayRef starts_in_column(at::IntArrayRef starts, int64_t column, int64_t outer_world) {
  return starts.slice(column * outer_world, outer_world + 1);
}

// The inner level of a gather can only begin when the outer one has arrived here. Ranks may wait for gathers in any
// order, but on each level messages pair up by order. So whoever waits for a gather begins the inner level of all that
// were started before it too.
struct TwoLevelExchange::Gathers {
  Mutex<LockRank::two_level_gathers> mutex;
  std::deque<std::shared_ptr<GatherPending>> begun{};  // those whose inner level has not begun, in the order of start
};

class TwoLevelExchange::GatherPending final : public Pending {
 public:
  GatherPending(Gathers& all, std::shared_ptr<Pending> outer, std::shared_ptr<Exchange> exchange, at::Tensor flat,
                std::vector<int64_t> starts)
      : Pending(Communicator{}),
        all_(all),
        outer_(std::move(outer)),
        inner_exchange_(std::move(exchange)),
        flat_(std::move(flat)),
        starts_(std::move(starts)) {}

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
      next.inner_ = next.inner_exchange_->gather(next.flat_, next.starts_);
      next.flat_.reset();
      all_.begun.pop_front();
    }
  }

  Gathers& all_;  // lives longer: see ~Gathers() in params/gathers.h, which waits for all
  std::shared_ptr<Pending> outer_;
  std::shared_ptr<Exchange> inner_exchange_;
  at::Tensor flat_;
  std::vector<int64_t> starts_;  // of columns
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

std::shared_ptr<Pending> TwoLevelExchange::gather(const at::Tensor& flat, at::IntArrayRef starts) {
  std::vector<int64_t> columns = starts_of_columns(starts, outer_->world());
  auto outer =
      outer_->gather(slice(flat, inner_->rank(), columns), starts_in_column(starts, inner_->rank(), outer_->world()));
  auto pending = std::make_shared<GatherPending>(*gathers_, std::move(outer), inner_, flat, std::move(columns));
  const std::lock_guard lock(gathers_->mutex);
  gathers_->begun.push_back(pending);
  return pending;
}

}  // namespace zx
