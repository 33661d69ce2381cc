// Reduction and norm: every instruction set gives the scalar bits and the same exact sums.
#include "elements.h"
#include "math/divisor.h"

namespace {

using namespace zx::testing;
using zx::DType;

Elements elements(bool finite, DType dtype, int64_t numel, int64_t offset) {
  return finite ? Elements::finite(dtype, numel, offset) : Elements::random(dtype, numel, offset);
}

struct ReduceBuffers {
  ReduceBuffers(bool finite, DType dtype, int64_t ranks, int64_t numel, int64_t offset)
      : shard(elements(finite, dtype, numel, offset)) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      slices.push_back(elements(finite, dtype, numel, (offset + rank) % 5));
    }
  }

  void run(const zx::KernelTable& table, bool accumulate, int64_t start, int64_t stop) {
    std::vector<const void*> starts;
    for (const Elements& slice : slices) starts.push_back(slice.at(start));
    const auto ranks = static_cast<int64_t>(slices.size());
    table.reduce({shard.dtype(), starts.data(), ranks, static_cast<double>(ranks),
                  zx::has_exact_inverse(static_cast<double>(ranks)), accumulate, shard.at(start), stop - start},
                 limbs.data());
  }

  Elements shard;
  std::vector<Elements> slices;
  Words limbs{};
};

TEST(reduce_gives_the_scalar_bits_and_words) {
  for (const zx::KernelTable* table : vector_tables()) {
    for (const DType dtype : kDTypes) {
      for (int64_t ranks = 1; ranks <= 5; ++ranks) {
        for (const bool accumulate : {false, true}) {
          for (const int64_t numel : kSizes) {
            for (const bool finite : {false, true}) {
              const ReduceBuffers before(finite, dtype, ranks, numel, numel % 4);
              ReduceBuffers expected = before;
              expected.run(zx::kernels_scalar(), accumulate, 0, numel);
              ReduceBuffers tested = before;
              tested.run(*table, accumulate, 0, numel);
              CHECK_EQ(tested.shard.differences(expected.shard), 0);
              CHECK_EQ(tested.limbs, expected.limbs);
              CHECK(tested.shard.canaries_live() && expected.shard.canaries_live());
            }
          }
        }
      }
    }
  }
}

TEST(reduce_may_be_cut_between_norm_blocks) {
  for (const std::string& isa : zx::supported_isas()) {
    zx::select_isa(isa);
    for (const DType dtype : kDTypes) {
      for (const int64_t cut : {0, 256, 512, 768, 1000}) {
        ReduceBuffers whole(/*finite=*/true, dtype, 3, 1000, 1);
        ReduceBuffers parts = whole;
        whole.run(zx::kernels(), true, 0, 1000);
        parts.run(zx::kernels(), true, cut, 1000);
        parts.run(zx::kernels(), true, 0, cut);
        CHECK_EQ(parts.shard.differences(whole.shard), 0);
        zx::exact_carry(parts.limbs.data());
        zx::exact_carry(whole.limbs.data());
        CHECK_EQ(parts.limbs, whole.limbs);
      }
    }
  }
}

constexpr std::array kNorms{zx::Norm::sum_of_abs, zx::Norm::sum_of_squares, zx::Norm::max_of_abs};

TEST(norm_gives_the_scalar_words) {
  for (const zx::KernelTable* table : vector_tables()) {
    for (const zx::Norm kind : kNorms) {
      for (const DType dtype : kDTypes) {
        for (const int64_t numel : kSizes) {
          for (const bool finite : {false, true}) {
            const Elements values = elements(finite, dtype, numel, numel % 3);
            Words expected{};
            Words tested{};
            zx::kernels_scalar().norm(kind, dtype, values.at(0), numel, {}, expected.data());
            table->norm(kind, dtype, values.at(0), numel, {}, tested.data());
            CHECK_EQ(tested, expected);
          }
        }
      }
    }
  }
}

TEST(a_norm_is_that_of_what_its_mask_keeps) {
  auto tables = vector_tables();
  tables.push_back(&zx::kernels_scalar());
  for (const zx::KernelTable* table : tables) {
    for (const zx::Norm kind : kNorms) {
      for (const DType dtype : kDTypes) {
        for (const int64_t first : {0, 5}) {
          const Elements values = elements(/*finite=*/first == 0, dtype, 1300, 1);
          const std::vector<uint8_t> mask = random_mask(1300, first);
          Elements kept = values;
          kept.clear_masked({mask.data(), first});
          Words expected{};
          Words tested{};
          zx::kernels_scalar().norm(kind, dtype, kept.at(0), 1300, {}, expected.data());
          table->norm(kind, dtype, values.at(0), 1300, {mask.data(), first}, tested.data());
          CHECK_EQ(tested, expected);
        }
      }
    }
  }
}

TEST(reduce_and_norm_count_the_same_squares) {
  for (const std::string& isa : zx::supported_isas()) {
    zx::select_isa(isa);
    for (const DType dtype : kDTypes) {
      ReduceBuffers reduced(/*finite=*/true, dtype, 2, 700, 1);
      reduced.run(zx::kernels(), false, 0, 700);
      Words limbs{};
      zx::kernels().norm(zx::Norm::sum_of_squares, dtype, reduced.shard.at(0), 700, {}, limbs.data());
      CHECK_EQ(reduced.limbs, limbs);
    }
  }
}

TEST(nan_and_infinity_are_counted_once_a_block) {
  for (const std::string& isa : zx::supported_isas()) {
    zx::select_isa(isa);
    for (const DType dtype : kDTypes) {
      for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        for (const int64_t where : {0, 15, 16, 240, 255, 256, 599}) {
          Elements values = Elements::finite(dtype, 600, 0);
          zx::kernels().cast(DType::f32, &bad, dtype, values.at(where), 1);
          Words limbs{};
          zx::kernels().norm(zx::Norm::sum_of_squares, dtype, values.at(0), 600, {}, limbs.data());
          CHECK_EQ(limbs[zx::kExactNonFinite], 1);
          CHECK_EQ(limbs[zx::kExactNan], std::isnan(bad) ? 1 : 0);
          CHECK_EQ(limbs[zx::kExactInf], std::isnan(bad) ? 0 : 1);
        }
      }
    }
  }
}

}  // namespace
