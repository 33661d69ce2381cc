#include "grads/two_level.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "exchange/two_level_exchange.h"
#include "grads/ops.h"
#include "grads/summing.h"
#include "locks.h"
#include "math/exact_sum.h"
#include "workers/ranges.h"

namespace zx {
namespace {

// How many elements are added up at a time on the CPU: what a core's cache holds.
constexpr int64_t kSumChunk = 32 * 1024;

// The messages of both levels; the outer ones come later.
class BothPending final : public Pending {
 public:
  explicit BothPending(std::shared_ptr<Pending> inner) : Pending(Communicator{}), inner_(std::move(inner)) {}

  void wait() override { inner_->wait(); }

  void set_outer(std::shared_ptr<Pending> outer) {
    const std::lock_guard lock(mutex_);
    outer_ = std::move(outer);
    if (is_aborted_) outer_->abort();
  }
  Pending& inner() { return *inner_; }

  void let_go() override {
    inner_->let_go();
    if (outer_) outer_->let_go();
  }
  void wait_for_readers() override {
    inner_->wait_for_readers();
    if (outer_) outer_->wait_for_readers();
  }
  void abort() override {
    inner_->abort();
    const std::lock_guard lock(mutex_);
    is_aborted_ = true;
    if (outer_) outer_->abort();
  }

 private:
  std::shared_ptr<Pending> inner_;
  Mutex<LockRank::both_pending> mutex_;  // of what another thread may abort
  std::shared_ptr<Pending> outer_{};
  bool is_aborted_ = false;
};

class TwoLevelSumming final : public Summing {
 public:
  TwoLevelSumming(std::shared_ptr<Exchange> inner, std::shared_ptr<Exchange> outer)
      : Summing(inner), inner_(std::move(inner)), outer_(std::move(outer)) {}

  std::shared_ptr<Pending> send(Flight& flight) override {
    flight.received = at::empty({inner_->num_received() * numel_of_column(*flight.bucket)}, flight.flat.options());
    return std::make_shared<BothPending>(inner_->scatter(flight.flat, flight.received, columns(*flight.bucket)));
  }

  void reduce(Flight& flight) override {
    const Bucket& bucket = *flight.bucket;
    const Range range("reduce", bucket.index);
    auto& pending = static_cast<BothPending&>(*flight.pending);
    // Sums are not rounded before the last one.
    const auto wide = flight.flat.options().dtype(at::promoteTypes(bucket.wire_dtype, at::kFloat));
    flight.inner_sums = at::empty({numel_of_column(bucket)}, wide);
    add_up(*inner_, pending.inner(), {flight.flat, flight.received, columns(bucket)}, flight.inner_sums);
    at::Tensor& left = flight.bucket->reduced.left;
    if (left.defined()) {
      drop_replaced(bucket, left, flight.inner_sums);
      flight.inner_sums.add_(left);
      left.reset();
    }
    if (flight.stays_inner) {
      left = std::move(flight.inner_sums);
      return;
    }
    at::Tensor received = at::empty({outer_->num_received() * bucket.own_slice_numel()}, wide);
    auto outer = outer_->scatter(flight.inner_sums, received, in_column(bucket));
    pending.set_outer(outer);
    outer->wait();
    at::Tensor total = at::empty({bucket.own_slice_numel()}, wide);
    add_up(*outer_, *outer, {flight.inner_sums, received, in_column(bucket).vec()}, total);
    take(flight, std::move(total));
  }

  bool takes_zero_copy(const Bucket& /*bucket*/) const override { return false; }
  int64_t most_in_a_part(const Bucket& /*bucket*/) const override { return std::numeric_limits<int64_t>::max(); }

 private:
  // Where slices begin: those of each column of owners, and those of this rank's.
  std::vector<int64_t> columns(const Bucket& bucket) const {
    return starts_of_columns(bucket.shards.packed_starts(), outer_->world());
  }
  at::IntArrayRef in_column(const Bucket& bucket) const {
    return starts_in_column(bucket.shards.packed_starts(), inner_->rank(), outer_->world());
  }
  int64_t numel_of_column(const Bucket& bucket) const { return in_column(bucket).back() - in_column(bucket).front(); }

  // Of what waits, what is replaced by what has come.
  void drop_replaced(const Bucket& bucket, at::Tensor& left, const at::Tensor& come) const {
    for (int64_t place = 0; place < outer_->world(); ++place) {
      const int64_t owner = inner_->rank() * outer_->world() + place;
      const int64_t slice = in_column(bucket)[place] - in_column(bucket).front();
      int64_t flag = slice + bucket.shards.numel(owner);
      for (const Slot& slot : bucket.slots) {
        if (!bucket.owns_part_of(slot, owner)) continue;
        const at::Tensor is_replaced = come[flag + 1].ne(0);
        const int64_t first = bucket.shards.start(owner);
        const int64_t start = std::max(slot.offset - first, int64_t{0});
        const int64_t stop = std::min(slot.offset + slot.numel(), bucket.shards.stop(owner)) - first;
        if (!left.is_cpu() || is_replaced.item<bool>()) {  // on an accelerator the host does not know
          left.narrow(0, slice + start, stop - start).masked_fill_(is_replaced, 0);
          left.narrow(0, flag, 1).masked_fill_(is_replaced, 0);
        }
        flag += 2;
      }
    }
  }

  // What one level has of the ranks' slices: its own of all, what came, and where they begin.
  struct Level {
    at::Tensor flat;
    at::Tensor received;
    std::vector<int64_t> starts;
  };

  // In rank order.
  void add_up(const Exchange& exchange, Pending& pending, const Level& level, at::Tensor& total) {
    const at::Tensor& flat = level.flat;
    const std::vector<at::Tensor> slices = exchange.to_sum(flat, level.received, level.starts);
    const int64_t most = total.is_cpu() ? kSumChunk : total.numel();
    for (int64_t start = 0; start < total.numel(); start += most) {
      const int64_t numel = std::min(most, total.numel() - start);
      at::Tensor into = total.narrow(0, start, numel);
      for (size_t rank = 0; rank < slices.size(); ++rank) {
        at::Tensor part;
        if (slices[rank].defined()) {
          part = slices[rank].narrow(0, start, numel);
        } else {
          if (!read_.defined() || read_.numel() < numel * flat.element_size()) {
            read_ = at::empty({kSumChunk * static_cast<int64_t>(sizeof(double))}, at::kByte);
          }
          part = read_.narrow(0, 0, numel * flat.element_size()).view(flat.scalar_type());
          pending.read(static_cast<int>(rank), 0, start, part);
        }
        if (rank == 0) {
          into.copy_(part);
        } else {
          into.add_(part);
        }
      }
    }
  }

  // Makes the sum over all ranks the mean, or adds it to the mean.
  void take(Flight& flight, at::Tensor total) {
    const Bucket& bucket = *flight.bucket;
    ReducedShard& reduced = flight.bucket->reduced;
    const AllMessages messages{{std::move(total)}};
    read_flags(flight, messages);
    const bool accumulate = std::exchange(reduced.has_gradient, true) && reduced.shard.defined();
    if (messages[0][0].scalar_type() == bucket.wire_dtype) {
      sum(flight, messages, accumulate);
      return;
    }
    at::Tensor mean = accumulate ? reduced.shard.to(messages[0][0].scalar_type())
                                 : at::empty({bucket.own_numel()}, messages[0][0].options());
    at::Tensor limbs = at::zeros({kExactLimbs}, mean.options().dtype(at::kLong));
    ops::reduce_(mean, limbs, {messages[0][0].narrow(0, 0, bucket.own_numel())}, bucket.own.segments, reduced.replaced,
                 reduced.divisor, accumulate);
    if (!accumulate && !reduced.keeps_shard) reduced.shard = at::empty({bucket.own_numel()}, flight.flat.options());
    reduced.shard.copy_(mean);
    reduced.limbs.reset();  // those were of what is not rounded yet
  }

  std::shared_ptr<Exchange> inner_;
  std::shared_ptr<Exchange> outer_;
  at::Tensor read_{};  // what was read from a neighbour
};

}  // namespace

std::unique_ptr<Reduction> make_two_level_reduction(std::shared_ptr<Exchange> inner, std::shared_ptr<Exchange> outer) {
  return std::make_unique<TwoLevelSumming>(std::move(inner), std::move(outer));
}

}  // namespace zx
