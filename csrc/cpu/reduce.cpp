// zerox::read_flags_ and zerox::reduce_ on the CPU: they make what the ranks sent into the mean gradient's shard.
#include <torch/library.h>

#include <cstring>
#include <mutex>

#include "cpu/spans.h"
#include "locks.h"
#include "math/divisor.h"
#include "math/exact_sum.h"

namespace zx {
namespace {

// After its shard, a slice has two elements for each segment: "present" and "replace what you hold". A segment is
// present if it is present anywhere now, or was present before and is replaced nowhere. It is replaced if it is
// replaced anywhere.
void read_flags_(at::Tensor& present, at::Tensor& replaced, at::TensorList slices, int64_t shard_numel) {
  check_read_flags(present, replaced, slices, shard_numel);
  const int64_t count = present.numel();
  auto* present_now = present.mutable_data_ptr<uint8_t>();
  auto* replaced_now = replaced.mutable_data_ptr<uint8_t>();
  std::vector<uint8_t> present_somewhere(static_cast<size_t>(count), 0);
  std::fill_n(replaced_now, count, uint8_t{0});
  for (const at::Tensor& slice : slices) {
    const auto width = static_cast<size_t>(slice.element_size());
    const auto raised = [&](int64_t element) {  // any bit: a flag is 0 or a positive number
      const char* bytes = bytes_at(slice, element);
      return std::any_of(bytes, bytes + width, [](char byte) { return byte != 0; });
    };
    for (int64_t i = 0; i < count; ++i) {
      present_somewhere[i] |= raised(shard_numel + 2 * i);
      replaced_now[i] |= raised(shard_numel + 2 * i + 1);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    present_now[i] = present_somewhere[i] | (present_now[i] & static_cast<uint8_t>(replaced_now[i] == 0));
  }
}

void reduce_(at::Tensor& shard, at::Tensor& limbs, at::TensorList slices, const at::Tensor& segments,
             const at::Tensor& replaced, double divisor, bool accumulate) {
  constexpr const char* op = "reduce_";
  check_reduce(shard, limbs, slices, segments, replaced, divisor);
  const DType dtype = dtype_of(shard, op, "shard");
  const SegmentTable table(segments, shard.numel(), op);
  const auto* replace = replaced.const_data_ptr<uint8_t>();
  const bool by_inverse = has_exact_inverse(divisor);

  const std::vector<WorkUnit> units = split_into_units(table);
  auto* total = limbs.mutable_data_ptr<int64_t>();
  Mutex<LockRank::sums> total_mutex;
  parallel_units(units, [&](int64_t first, int64_t last) {
    int64_t local[kExactLimbs] = {};
    std::vector<const void*> starts(slices.size());
    for (int64_t i = first; i < last; ++i) {
      const WorkUnit& unit = units[i];
      for (size_t rank = 0; rank < slices.size(); ++rank) starts[rank] = bytes_at(slices[rank], unit.start);
      const bool keep = accumulate && replace[unit.segment] == 0;
      kernels().reduce({dtype, starts.data(), static_cast<int64_t>(starts.size()), divisor, by_inverse, keep,
                        bytes_at(shard, unit.start), unit.stop - unit.start},
                       local);
    }
    const std::lock_guard lock(total_mutex);
    for (int limb = 0; limb < kExactLimbs; ++limb) total[limb] += local[limb];
  });
  const auto zero = [&](int64_t start, int64_t stop) {  // padding is sent too, where shards are gathered
    if (stop > start) std::memset(bytes_at(shard, start), 0, static_cast<size_t>(stop - start) * shard.element_size());
  };
  int64_t end = 0;
  for (int64_t i = 0; i < table.size(); ++i) {
    zero(end, table[i].start);
    end = table[i].stop;
  }
  zero(end, shard.numel());
  exact_carry(total);  // leaves room for the sum over buckets and ranks
}

}  // namespace

TORCH_LIBRARY_IMPL(zerox, CPU, m) {
  m.impl("read_flags_", &read_flags_);
  m.impl("reduce_", &reduce_);
}

}  // namespace zx
