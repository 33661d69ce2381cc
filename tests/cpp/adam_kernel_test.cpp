// The update: every instruction set gives the scalar bits, whatever the dtypes, kinds of moments, options and places
// where spans are cut. What the scalar kernel computes is held against torch in tests/kernels.
#include "adam_cases.h"

namespace {

using namespace zx::testing;
using zx::DType;
using zx::Master;
using zx::StateKind;

// Everything one call reads and writes.
struct AdamBuffers {
  AdamBuffers(const AdamCase& c, int64_t numel, int64_t offset)
      : what(c),
        param(Elements::random(c.param, numel, offset)),
        master(Elements::random(master_dtype(c), numel, offset + 1)),
        grad(Elements::random(c.grad, numel, offset + 2)),
        moments(c, numel, offset) {
    make_masters(c, numel, param, master);
  }

  void run(const zx::KernelTable& table, const zx::AdamStep<double>& step, int64_t start, int64_t stop) {
    table.adam({what.param, what.master, what.grad, what.amsgrad, param.at(start),
                what.master == Master::none ? nullptr : master.at(start), grad.at(start), moments.at(start),
                stop - start, kParamStart + start, kKey},
               step);
  }

  void check_same(const AdamBuffers& expected, const std::string& name) const {
    const auto check = [&name](const Elements& a, const Elements& b, const char* part) {
      CHECK_FOR(joined({name, part}), a.differences(b) == 0);
      CHECK(a.canaries_live());
    };
    check(param, expected.param, "param");
    check(master, expected.master, "master");
    moments.check_same(expected.moments, name);
    CHECK(grad.same_bytes(expected.grad));
  }

  AdamCase what;
  Elements param;
  Elements master;
  Elements grad;
  StoredMoments moments;

  // The lower half of an element's index overflows within the span.
  static constexpr int64_t kParamStart = (int64_t{1} << 32) - 50;
  static constexpr zx::RandomKey kKey{0x12345678, 0x9abcdef0};
};

std::vector<zx::AdamStep<double>> adam_steps() {
  return {zx::fold_adam({1e-3, 0.9, 0.999, 1e-8, 1e-2, 0.0, 1.0, 0.0}, 3, 0.5),    // AdamW
          zx::fold_adam({1e-2, 0.9, 0.95, 1e-6, 1e-1, 1.0, 0.0, 0.0}, 1000, 1.0),  // L2, maximize
          zx::fold_adam({1e-3, 0.3, 0.999, 1e-8, 0.0, 0.0, 0.0, 0.0}, 1, 1.0)};    // lerp from the gradient
}

TEST(adam_gives_the_scalar_bits_for_every_dtype_and_option) {
  const auto tables = vector_tables();
  const auto steps = adam_steps();
  size_t round = 0;
  for (const StateKind state : kStateKinds) {
    for (const AdamCase& c : adam_cases(state)) {
      for (const int64_t numel : kSizes) {
        for (const auto& step : steps) {
          const AdamBuffers before(c, numel, static_cast<int64_t>(round++ % 4));
          AdamBuffers expected = before;
          expected.run(zx::kernels_scalar(), step, 0, numel);
          expected.check_same(expected, "scalar");  // canaries
          CHECK(expected.grad.same_bytes(before.grad));
          for (const zx::KernelTable* table : tables) {
            AdamBuffers tested = before;
            tested.run(*table, step, 0, numel);
            tested.check_same(expected, joined({table->name, name_of(c)}));
          }
        }
      }
    }
  }
}

TEST(adam_may_be_cut_anywhere) {
  for (const std::string& isa : zx::supported_isas()) {
    zx::select_isa(isa);
    for (const StateKind state : kStateKinds) {
      const int64_t unit = state == StateKind::blockwise ? zx::kMomentBlock : 1;
      for (const AdamCase& c : adam_cases(state)) {
        for (const int64_t cut : {0, 1, 13, 16, 50, 99, 100}) {
          const int64_t numel = 100 * unit - unit / 2;  // ends in half a block
          const int64_t place = std::min(cut * unit, numel);
          const AdamBuffers before(c, numel, 1);
          AdamBuffers whole = before;
          whole.run(zx::kernels(), adam_steps()[0], 0, numel);
          AdamBuffers parts = before;
          parts.run(zx::kernels(), adam_steps()[0], place, numel);
          parts.run(zx::kernels(), adam_steps()[0], 0, place);
          parts.check_same(whole, joined({isa, name_of(c)}));
        }
      }
    }
  }
}

// The one place where a bit pattern of a master decides what the next step starts from.
TEST(every_pair_of_parameter_and_remainder_is_joined_alike) {
  constexpr int64_t kPatterns = 0x10000;
  const zx::AdamStep<double> nothing = zx::fold_adam({0.0, 0.9, 0.999, 1.0, 0.0, 0.0, 1.0, 0.0}, 1, 1.0);
  for (const int remainder : {-32768, -32767, -1, 0, 1, 32767}) {
    AdamBuffers before({DType::bf16, Master::remainder, DType::f32, false}, kPatterns, 0);
    for (int64_t i = 0; i < kPatterns; ++i) {
      before.param.set(i, static_cast<uint64_t>(i));
      before.master.set(i, static_cast<uint64_t>(remainder));
      for (Elements* zero : {&before.grad, &before.moments.exp_avg.values, &before.moments.exp_avg_sq.values}) {
        zero->set(i, 0);
      }
    }
    for (const std::string& isa : zx::supported_isas()) {
      zx::select_isa(isa);
      AdamBuffers after = before;
      after.run(zx::kernels(), nothing, 0, kPatterns);
      int64_t num_wrong = 0;
      for (int64_t i = 0; i < kPatterns; ++i) {
        const zx::bf16 param{static_cast<uint16_t>(i)};
        const float joined = zx::join_master(param, static_cast<int16_t>(remainder));
        // -0 + -0 * lr / eps is -0 + +0 or -0 + -0, whatever the sign of the step: zeros keep no sign here.
        const zx::SplitMaster split = zx::split_master(joined);
        const bool zero = (split.param.bits & 0x7fff) == 0 && split.remainder == 0;
        num_wrong += !zero && (after.param.get(i) != split.param.bits ||
                               after.master.get(i) != static_cast<uint16_t>(split.remainder));
      }
      CHECK_EQ(num_wrong, 0);
    }
  }
}

}  // namespace
