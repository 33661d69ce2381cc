// Conversions: every instruction set gives the bits of the scalar one, and writes nothing beside its span.
#include "elements.h"

namespace {

using namespace zx::testing;
using zx::DType;

TEST(cast_gives_the_bits_of_the_scalar_conversion) {
  const auto tables = vector_tables();
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      for (const int64_t numel : kSizes) {
        for (const int64_t offset : {0, 1, 3}) {
          const Elements source = Elements::random(from, numel, offset);
          Elements expected(to, numel, offset + 1);
          zx::kernels_scalar().cast(from, source.at(0), to, expected.at(0), numel);
          CHECK(expected.canaries_live());
          for (const zx::KernelTable* table : tables) {
            Elements target(to, numel, offset + 1);
            table->cast(from, source.at(0), to, target.at(0), numel);
            CHECK_FOR(joined({table->name, name_of(from), name_of(to)}), target.same_bytes(expected));
            CHECK(target.canaries_live());
          }
        }
      }
    }
  }
}

TEST(every_16_bit_pattern_is_cast_alike) {
  constexpr int64_t kPatterns = 0x10000;
  for (const zx::KernelTable* table : vector_tables()) {
    for (const DType from : {DType::bf16, DType::f16}) {
      Elements source(from, kPatterns, 0);
      for (int64_t i = 0; i < kPatterns; ++i) source.set(i, static_cast<uint64_t>(i));
      for (const DType to : kDTypes) {
        Elements expected(to, kPatterns, 0);
        Elements target(to, kPatterns, 0);
        zx::kernels_scalar().cast(from, source.at(0), to, expected.at(0), kPatterns);
        table->cast(from, source.at(0), to, target.at(0), kPatterns);
        CHECK(target.same_bytes(expected));
      }
    }
  }
}

}  // namespace
