// CUDA reduction, norms and flags, run on the host: the CPU's bits and the same exact sums.
#include "cuda_shards.h"
#include "math/divisor.h"

namespace {

using namespace zx::testing;
using zx::DType;
using zx::Norm;
using zx::Segment;

Elements elements(bool finite, DType dtype, int64_t numel, int64_t offset) {
  return finite ? Elements::finite(dtype, numel, offset) : Elements::random(dtype, numel, offset);
}

// A shard and what the ranks sent for it. Every third segment is replaced where the rest accumulates.
struct Shard {
  Shard(bool finite, DType dtype, int64_t ranks, const SegmentLayout& layout, int64_t offset)
      : segments(layout.segments), shard(elements(finite, dtype, layout.numel, offset)) {
    for (int64_t rank = 0; rank < ranks; ++rank) slices.push_back(elements(finite, dtype, layout.numel, offset));
    for (size_t i = 0; i < segments.size(); ++i) replaced.push_back(i % 3 == 1 ? 1 : 0);
  }

  void run_cuda(bool accumulate, double divisor) {
    std::vector<const void*> starts;
    for (const Elements& slice : slices) starts.push_back(slice.at(0));
    CHECK_EQ(zx::cuda::reduce({shard.dtype(), starts.data(), static_cast<int64_t>(starts.size())}, divisor,
                              {shard.at(0), shard.numel(), segments.data(), static_cast<int64_t>(segments.size()),
                               replaced.data(), accumulate, limbs.data()},
                              kHost),
             0);
  }

  void run_cpu(bool accumulate, double divisor) {
    int64_t end = 0;
    const auto zero = [&](int64_t start, int64_t stop) {
      for (int64_t i = start; i < stop; ++i) shard.set(i, 0);
    };
    for (size_t i = 0; i < segments.size(); ++i) {
      const auto [start, stop, row, number, from] = segments[i];
      std::vector<const void*> starts;
      for (const Elements& slice : slices) starts.push_back(slice.at(start));
      zx::kernels_scalar().reduce(
          {shard.dtype(), starts.data(), static_cast<int64_t>(starts.size()), divisor, zx::has_exact_inverse(divisor),
           accumulate && replaced[i] == 0, shard.at(start), stop - start},
          limbs.data());
      zero(end, start);
      end = stop;
    }
    zero(end, shard.numel());
    zx::exact_carry(limbs.data());
  }

  void check_same(const Shard& expected, const std::string& name) const {
    CHECK_FOR(name, shard.differences(expected.shard) == 0);
    CHECK_FOR(name, shard.canaries_live());
    CHECK_FOR(name, limbs == expected.limbs);
  }

  std::vector<Segment> segments;
  Elements shard;
  std::vector<Elements> slices{};
  std::vector<uint8_t> replaced{};
  Words limbs{};
};

struct Way {
  int64_t ranks;
  bool accumulate;
  bool finite;
  int64_t offset;  // 1: no tensor starts at a multiple of 16 bytes
};
constexpr std::array kWays{Way{1, false, true, 0}, Way{1, true, false, 0},  Way{2, true, true, 0},
                           Way{2, false, true, 1}, Way{5, false, false, 0}, Way{5, true, true, 1}};

TEST(reduce_gives_the_cpu_bits_and_words_for_every_dtype_and_segment_edge) {
  for (const DType dtype : kDTypes) {
    for (const SegmentLayout& layout : segment_layouts()) {
      for (const auto& [ranks, accumulate, finite, offset] : kWays) {
        Shard expected(finite, dtype, ranks, layout, offset);
        Shard tested = expected;
        expected.run_cpu(accumulate, ranks);
        tested.run_cuda(accumulate, ranks);
        tested.check_same(expected, joined({name_of(dtype), layout.name, std::to_string(ranks)}));
      }
    }
  }
}

TEST(reduce_gives_the_same_bits_in_every_order_of_threads) {
  for (const DType dtype : kDTypes) {
    for (const SegmentLayout& layout : segment_layouts()) {
      Shard expected(/*finite=*/true, dtype, 3, layout, 0);
      const Shard before = expected;
      expected.run_cpu(true, 3);
      in_every_order([&] {
        Shard tested = before;
        tested.run_cuda(true, 3);
        tested.check_same(expected, joined({name_of(dtype), layout.name}));
      });
    }
  }
}

// A collective of the backend's own gives one slice, the sum over all ranks.
TEST(reduce_divides_by_any_number) {
  for (const double divisor : {7.0, 0.3, 1.0, 0.25, 1e6}) {
    Shard expected(/*finite=*/true, DType::f32, 1, layout_of("", {700}, 0, 68), 0);
    Shard tested = expected;
    expected.run_cpu(false, divisor);
    tested.run_cuda(false, divisor);
    tested.check_same(expected, "divided by " + std::to_string(divisor));
  }
}

TEST(one_misaligned_slice_is_read_all_the_same) {
  for (const DType dtype : kDTypes) {
    Shard expected(/*finite=*/true, dtype, 3, layout_of("", {3000}, 0, 72), 0);
    expected.slices[1] = Elements::finite(dtype, 3072, 1);
    Shard tested = expected;
    expected.run_cpu(true, 3);
    tested.run_cuda(true, 3);
    tested.check_same(expected, name_of(dtype));
  }
}

// ---- norms

constexpr std::array kOrders{1.0, 2.0, std::numeric_limits<double>::infinity(), 3.0, 0.5};

// The order of csrc/cpu/norm.cpp, which is an op of torch's.
void add_powers(const Elements& values, int64_t start, int64_t stop, double order, Words& limbs) {
  for (int64_t block = start; block < stop; block += zx::kNormBlock) {
    std::array<double, zx::kNormAccumulators> sums{};
    bool finite = true;
    for (int64_t i = block; i < std::min(block + zx::kNormBlock, stop); ++i) {
      finite = finite && std::isfinite(values.number(i));
      sums[static_cast<size_t>((i - block) % zx::kNormAccumulators)] += std::pow(std::fabs(values.number(i)), order);
    }
    for (size_t half = sums.size() / 2; half > 0; half /= 2) {
      for (size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    }
    limbs[zx::kExactNonFinite] += finite ? 0 : 1;
    zx::exact_add(limbs.data(), sums[0]);
  }
}

TEST(norm_gives_the_cpu_words_for_every_order_and_segment_edge) {
  for (const double order : kOrders) {
    for (const DType dtype : kDTypes) {
      for (const SegmentLayout& layout : segment_layouts()) {
        for (const int64_t offset : {0, 1, 4}) {
          const bool masked = offset == 4;
          const Elements values = elements(/*finite=*/offset == 1, dtype, layout.numel, offset);
          const std::vector<uint8_t> mask = random_mask(layout.numel, 0);
          const auto kept = [&](int64_t start) { return zx::KeptBits{masked ? mask.data() : nullptr, start}; };
          Elements counted = values;
          if (masked) counted.clear_masked(kept(0));
          const Norm kind = zx::norm_of_order(order);
          Words expected{};
          Words tested{};
          for (const auto& [start, stop, row, number, from] : layout.segments) {
            if (kind == Norm::sum_of_powers) {
              add_powers(counted, start, stop, order, expected);
            } else {
              zx::kernels_scalar().norm(kind, dtype, counted.at(start), stop - start, {}, expected.data());
            }
          }
          if (kind != Norm::max_of_abs) zx::exact_carry(expected.data());
          CHECK_EQ(zx::cuda::norm({dtype, values.at(0), layout.numel, layout.segments.data(),
                                   static_cast<int64_t>(layout.segments.size()), order, tested.data(), kept(0)},
                                  kHost),
                   0);
          CHECK_FOR(joined({name_of(dtype), layout.name, std::to_string(order)}), tested == expected);
        }
      }
    }
  }
}

TEST(norm_value_reads_what_the_words_stand_for) {
  for (const double order : kOrders) {
    for (const bool finite : {true, false}) {
      const Elements values = elements(finite, DType::f32, 1000, 0);
      const Segment all{0, 1000, 0, 0, 0};
      Words limbs{};
      zx::cuda::norm({DType::f32, values.at(0), 1000, &all, 1, order, limbs.data()}, kHost);
      const Words before = limbs;
      std::array<double, 2> value{-1.0, -1.0};
      in_every_order([&] { CHECK_EQ(zx::cuda::norm_value(limbs.data(), 1, order, value.data(), kHost), 0); });
      CHECK_EQ(limbs, before);
      const std::array<Words, 3> several{Words{}, limbs, Words{}};
      std::array<double, 6> values_of{-1.0, -1.0, -1.0, -1.0, -1.0, -1.0};
      CHECK_EQ(zx::cuda::norm_value(several[0].data(), 3, order, values_of.data(), kHost), 0);
      CHECK_EQ(values_of[0], 0.0);
      CHECK_EQ(std::bit_cast<int64_t>(values_of[2]), std::bit_cast<int64_t>(value[0]));
      CHECK_EQ(values_of[3], value[1]);
      CHECK_EQ(values_of[5], 1.0);
      CHECK_EQ(value[1], finite ? 1.0 : 0.0);
      if (!finite) continue;
      double largest = 0.0;
      double sum = 0.0;
      for (int64_t i = 0; i < 1000; ++i) {
        largest = std::max(largest, std::fabs(values.number(i)));
        sum += std::pow(std::fabs(values.number(i)), order);
      }
      const double direct = std::isinf(order) ? largest : std::pow(sum, 1.0 / order);
      CHECK(std::fabs(value[0] - direct) <= 1e-12 * direct);
    }
  }
}

TEST(carry_keeps_the_sum_and_leaves_room) {
  Words limbs{};
  for (int64_t i = 0; i < 3000; ++i) zx::exact_add(limbs.data(), 0x1.fffffffffffffp+300);
  Words expected = limbs;
  zx::exact_carry(expected.data());
  CHECK(limbs != expected);
  CHECK_EQ(zx::cuda::carry(limbs.data(), kHost), 0);
  CHECK_EQ(limbs, expected);
}

// ---- flags

TEST(flags_of_all_slices_decide_what_is_present) {
  for (const DType dtype : kDTypes) {
    for (const int64_t num_segments : {0, 1, 5, 1000}) {
      constexpr int64_t kShard = 16;
      constexpr int64_t kRanks = 3;
      std::vector<Elements> slices;
      for (int64_t rank = 0; rank < kRanks; ++rank) {
        slices.emplace_back(dtype, kShard + 2 * num_segments, 0);
        for (int64_t i = 0; i < 2 * num_segments; ++i) slices.back().set(kShard + i, 0);
        for (int64_t i = 0; i < 2 * num_segments; ++i) {
          const float one = 1.0F;
          if (random_bits() % 4 == 0)
            zx::kernels_scalar().cast(DType::f32, &one, dtype, slices.back().at(kShard + i), 1);
        }
      }
      std::vector<uint8_t> present;
      for (int64_t i = 0; i < num_segments; ++i) present.push_back(random_bits() % 2);
      std::vector<uint8_t> replaced(static_cast<size_t>(num_segments), 0xcd);
      const std::vector<uint8_t> before = present;
      std::vector<const void*> starts;
      for (const Elements& slice : slices) starts.push_back(slice.at(0));
      CHECK_EQ(zx::cuda::read_flags({dtype, starts.data(), kRanks}, kShard,
                                    {present.data(), replaced.data(), num_segments}, kHost),
               0);
      for (int64_t i = 0; i < num_segments; ++i) {
        bool any_present = false;
        bool any_replaced = false;
        for (const Elements& slice : slices) {
          any_present |= slice.number(kShard + 2 * i) != 0.0;
          any_replaced |= slice.number(kShard + 2 * i + 1) != 0.0;
        }
        const auto at = static_cast<size_t>(i);
        CHECK_EQ(replaced[at] != 0, any_replaced);
        CHECK_EQ(present[at] != 0, any_present || (before[at] != 0 && !any_replaced));
      }
    }
  }
}

// ---- the stand-in itself

struct RaceArgs {
  int* sums;
  bool barrier;
};

// Each thread reads its neighbour's number.
void neighbours_kernel(RaceArgs a) {
  using Numbers = int[zx::cuda::kThreads];
  ZX_SHARED(Numbers, numbers);
  numbers[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (a.barrier) __syncthreads();
  a.sums[threadIdx.x] = numbers[(threadIdx.x + 1) % zx::cuda::kThreads];
}

TEST(a_missing_barrier_shows_in_every_order) {
  for (const bool barrier : {true, false}) {
    in_every_order([barrier] {
      std::vector<int> sums(zx::cuda::kThreads);
      zx::cuda::launch(neighbours_kernel, 1, kHost, RaceArgs{sums.data(), barrier});
      int num_wrong = 0;
      for (int i = 0; i < zx::cuda::kThreads; ++i)
        num_wrong += sums[static_cast<size_t>(i)] != (i + 1) % zx::cuda::kThreads;
      CHECK_EQ(num_wrong > 0, !barrier);
    });
  }
}

}  // namespace
