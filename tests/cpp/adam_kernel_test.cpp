// The update: every instruction set gives the scalar bits, whatever the dtypes, options and places where spans are
// cut. What the scalar kernel computes is held against torch in tests/kernels.
#include "elements.h"

namespace {

using namespace zx::testing;
using zx::DType;
using zx::Master;
using zx::testing::name_of;  // beside the overload below

struct AdamCase {
  DType param;
  Master master;
  DType grad;
  bool amsgrad;
};

std::vector<AdamCase> adam_cases() {
  std::vector<AdamCase> cases;
  for (const bool amsgrad : {false, true}) {
    for (const DType grad : kDTypes) {
      cases.push_back({DType::f64, Master::none, grad, amsgrad});
      if (grad == DType::f64) continue;
      cases.push_back({DType::f32, Master::none, grad, amsgrad});
      for (const DType half : {DType::bf16, DType::f16}) {
        cases.push_back({half, Master::none, grad, amsgrad});
        cases.push_back({half, Master::fp32, grad, amsgrad});
      }
      cases.push_back({DType::bf16, Master::remainder, grad, amsgrad});
    }
  }
  return cases;
}

std::string name_of(const AdamCase& c) {
  constexpr std::array masters{"none", "remainder", "fp32"};
  return joined(
      {name_of(c.param), masters[static_cast<size_t>(c.master)], name_of(c.grad), c.amsgrad ? "amsgrad" : ""});
}

// Everything one call reads and writes.
struct AdamBuffers {
  AdamBuffers(const AdamCase& c, int64_t numel, int64_t offset)
      : what(c),
        param(Elements::random(c.param, numel, offset)),
        master(Elements::random(c.master == Master::remainder ? DType::bf16 : DType::f32, numel, offset + 1)),
        grad(Elements::random(c.grad, numel, offset + 2)),
        exp_avg(Elements::random(state(c), numel, offset + 1)),
        exp_avg_sq(Elements::random(state(c), numel, offset)),
        max_exp_avg_sq(Elements::random(state(c), numel, offset + 3)) {
    // Masters that round to their parameter, but every third, as if somebody had written into the parameter.
    for (int64_t i = 0; c.master == Master::fp32 && i < numel; ++i) {
      if (i % 3 == 0) continue;
      const float exact = std::bit_cast<float>(static_cast<uint32_t>(master.get(i)));
      param.set(i, c.param == DType::bf16 ? zx::float_to_bf16(exact).bits : zx::float_to_f16(exact).bits);
    }
  }

  static DType state(const AdamCase& c) { return c.param == DType::f64 ? DType::f64 : DType::f32; }

  void run(const zx::KernelTable& table, const zx::AdamStep<double>& step, int64_t start, int64_t stop) {
    table.adam({what.param, what.master, what.grad, what.amsgrad, param.at(start),
                what.master == Master::none ? nullptr : master.at(start), grad.at(start), exp_avg.at(start),
                exp_avg_sq.at(start), what.amsgrad ? max_exp_avg_sq.at(start) : nullptr, stop - start},
               step);
  }

  void check_same(const AdamBuffers& expected, const std::string& name) const {
    const auto check = [&name](const Elements& a, const Elements& b, const char* part) {
      CHECK_FOR(joined({name, part}), a.differences(b) == 0);
      CHECK(a.canaries_live());
    };
    check(param, expected.param, "param");
    check(master, expected.master, "master");
    check(exp_avg, expected.exp_avg, "exp_avg");
    check(exp_avg_sq, expected.exp_avg_sq, "exp_avg_sq");
    check(max_exp_avg_sq, expected.max_exp_avg_sq, "max_exp_avg_sq");
    CHECK(grad.same_bytes(expected.grad));
  }

  AdamCase what;
  Elements param;
  Elements master;
  Elements grad;
  Elements exp_avg;
  Elements exp_avg_sq;
  Elements max_exp_avg_sq;
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
  for (const AdamCase& c : adam_cases()) {
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

TEST(adam_may_be_cut_anywhere) {
  for (const std::string& isa : zx::supported_isas()) {
    zx::select_isa(isa);
    for (const AdamCase& c : adam_cases()) {
      for (const int64_t cut : {0, 1, 13, 16, 50, 99, 100}) {
        const AdamBuffers before(c, 100, 1);
        AdamBuffers whole = before;
        whole.run(zx::kernels(), adam_steps()[0], 0, 100);
        AdamBuffers parts = before;
        parts.run(zx::kernels(), adam_steps()[0], cut, 100);
        parts.run(zx::kernels(), adam_steps()[0], 0, cut);
        parts.check_same(whole, joined({isa, name_of(c)}));
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
      for (Elements* zero : {&before.grad, &before.exp_avg, &before.exp_avg_sq}) zero->set(i, 0);
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
