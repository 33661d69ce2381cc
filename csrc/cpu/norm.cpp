// zerox::norm_ and zerox::norm_value on the CPU. See Note [Norms are summed exactly].
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <mutex>

#include "cpu/spans.h"
#include "locks.h"
#include "math/exact_sum.h"

namespace zx {
namespace {

// For any other p: sums |x|^p with the library's pow. There is one code path, so no choice of instruction set changes
// it.
void power_partials(double p, const at::Tensor& shard, KeptBits kept, int64_t start, int64_t stop, int64_t* limbs) {
  const DType dtype = dtype_of(shard, "norm_", "shard");
  for (int64_t block = start; block < stop; block += kNormBlock) {
    const int64_t count = std::min(kNormBlock, stop - block);
    double wide[kNormBlock];
    kernels().cast(dtype, bytes_at(shard, block), DType::f64, wide, count);
    for (int64_t i = 0; i < count; ++i) {
      if (!kept.has_all() && !kept.at(block + i)) wide[i] = 0.0;
    }
    double sums[kNormAccumulators] = {};
    bool finite = true;
    for (int64_t i = 0; i < count; ++i) {
      finite = finite && std::isfinite(wide[i]);
      sums[i % kNormAccumulators] += std::pow(std::fabs(wide[i]), p);
    }
    for (int half = kNormAccumulators / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    }
    limbs[kExactNonFinite] += finite ? 0 : 1;
    exact_add(limbs, sums[0]);
  }
}

void merge(double p, const int64_t* local, int64_t* total) {
  if (std::isinf(p)) {
    total[0] = std::max(total[0], local[0]);
    return;
  }
  for (int limb = 0; limb < kExactLimbs; ++limb) total[limb] += local[limb];
}

// Adds sum |x|^p over the segments of a shard to `limbs`, or over each to its own; for p = inf keeps the bits of the
// largest |x|.
void norm_(at::Tensor& limbs, const at::Tensor& shard, const at::Tensor& segments, double p,
           const std::optional<at::Tensor>& mask) {
  constexpr const char* op = "norm_";
  const bool by_segment = check_norm(limbs, shard, segments, p);
  const KeptBits kept = check_mask(mask, shard, op);
  const DType dtype = dtype_of(shard, op, "shard");
  const Norm kind = norm_of_order(p);
  const SegmentTable table(segments, shard.numel(), op);
  const std::vector<WorkUnit> units = split_into_units(table);
  auto* total = limbs.mutable_data_ptr<int64_t>();
  Mutex<LockRank::sums> total_mutex;
  const auto add = [&](const WorkUnit& unit, int64_t* sum) {
    if (kind != Norm::sum_of_powers) {
      kernels().norm(kind, dtype, bytes_at(shard, unit.start), unit.stop - unit.start, kept.from(unit.start), sum);
    } else {
      power_partials(p, shard, kept, unit.start, unit.stop, sum);
    }
  };
  parallel_units(units, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last;) {
      int64_t local[kExactLimbs] = {};
      const int64_t segment = units[i].segment;
      for (; i < last && (!by_segment || units[i].segment == segment); ++i) add(units[i], local);
      const std::lock_guard lock(total_mutex);
      merge(p, local, by_segment ? total + segment * kExactLimbs : total);
    }
  });
  if (std::isinf(p)) return;
  const int64_t sums = by_segment ? table.size() : 1;
  for (int64_t i = 0; i < sums; ++i) exact_carry(total + i * kExactLimbs);  // room for the sum over buckets and ranks
}

// The norm as a double and whether every element was finite (1.0 or 0.0): a float64 tensor of two, or a row of it for
// each sum.
at::Tensor norm_value(const at::Tensor& limbs, double p) {
  const int64_t count = check_norm_value(limbs, p);
  at::Tensor result = at::empty({count, 2}, limbs.options().dtype(at::kDouble));
  auto* value = result.mutable_data_ptr<double>();
  for (int64_t i = 0; i < count; ++i, value += 2) {
    int64_t copy[kExactLimbs];
    std::copy_n(limbs.const_data_ptr<int64_t>() + i * kExactLimbs, kExactLimbs, copy);
    if (std::isinf(p)) {
      value[0] = std::bit_cast<double>(copy[0]);
      value[1] = std::isfinite(value[0]) ? 1.0 : 0.0;
    } else {
      const double sum = exact_value(copy);
      value[0] = p == 1.0 ? sum : p == 2.0 ? std::sqrt(sum) : std::pow(sum, 1.0 / p);
      value[1] = copy[kExactNonFinite] == 0 ? 1.0 : 0.0;
    }
  }
  return limbs.dim() == 2 ? result : result.reshape({2});
}

}  // namespace

TORCH_LIBRARY_IMPL(zerox, CPU, m) {
  m.impl("norm_", &norm_);
  m.impl("norm_value", &norm_value);
}

}  // namespace zx
