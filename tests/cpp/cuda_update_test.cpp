// The CUDA update, run on the host: the bits of the CPU's over all dtypes, segments, alignments and orders of threads.
#include "cuda_shards.h"
#include "math/scalar_lane.h"
#include "update_cases.h"

namespace {

using namespace zx::testing;
using zx::Adam;
using zx::DType;
using zx::Master;
using zx::Segment;
using zx::StateKind;

const std::vector<Adam::Options>& options_table() {
  static const std::vector<Adam::Options> rows{{1e-3, 0.9, 0.999, 1e-8, 1e-2, 0.0, 1.0, 0.0},  // AdamW
                                               {1e-2, 0.9, 0.95, 1e-6, 1e-1, 1.0, 0.0, 1.0},   // L2, maximize, amsgrad
                                               {1e-3, 0.3, 0.999, 1e-8, 0.0, 0.0, 0.0, 0.0}};  // lerp from the gradient
  return rows;
}

// A shard with its tables. Every seventh segment is absent; options and step counts vary from segment to segment.
struct Shard {
  Shard(const UpdateCase& c, const SegmentLayout& layout, int64_t offset, bool finite = false)
      : what(c),
        segments(layout.segments),
        numel(layout.numel),
        param(elements(finite, c.param, offset)),
        master(elements(finite, master_dtype(c), offset)),
        grad(elements(finite, c.grad, offset)),
        moments(c, layout.numel, offset, finite) {
    make_masters(c, numel, param, master);
    for (size_t i = 0; i < segments.size(); ++i) {
      segments[i].options_row = c.amsgrad ? static_cast<int64_t>(i % 3) : static_cast<int64_t>(i % 2) * 2;
      present.push_back(i % 7 != 3 ? 1 : 0);
      steps.push_back(static_cast<int64_t>(i * i));
    }
  }

  Elements elements(bool finite, DType dtype, int64_t offset) const {
    return finite ? Elements::finite(dtype, numel, offset) : Elements::random(dtype, numel, offset);
  }

  // The parameter's value as it is kept: the master's, while that rounds to the parameter.
  double exact(int64_t i) const {
    using Lane = zx::ScalarLane<float>;
    const auto bits = static_cast<uint16_t>(param.get(i));
    const auto kept = std::bit_cast<float>(static_cast<uint32_t>(master.get(i)));
    if (what.master == Master::remainder) return zx::join_master({bits}, static_cast<int16_t>(master.get(i)));
    if (what.master == Master::none) return param.number(i);
    const zx::bf16 as_bf16{bits};
    const zx::f16 as_f16{bits};
    return what.param == DType::bf16 ? Lane::load_master(&as_bf16, &kept).x : Lane::load_master(&as_f16, &kept).x;
  }

  void run_cuda() { run_together({this}); }

  static void run_together(const std::vector<Shard*>& shards) {
    const double scale = 0.5;
    std::vector<std::vector<char>> scratch;
    std::vector<zx::cuda::UpdateShard> launched;
    for (Shard* s : shards) {
      const UpdateCase& what = s->what;
      scratch.emplace_back(s->segments.size() * zx::cuda::kFoldedBytes, static_cast<char>(0xcd));
      launched.push_back(
          {{zx::RuleKind::adam, what.param, what.master, what.grad, s->param.at(0),
            what.master == Master::none ? nullptr : s->master.at(0), s->grad.at(0), s->moments.at(0), s->numel},
           {s->segments.data(), static_cast<int64_t>(s->segments.size()), s->present.data(), s->steps.data(),
            &options_table().front().lr, &scale, scratch.back().data()}});
    }
    CHECK_EQ(zx::cuda::update({launched.data(), static_cast<int64_t>(launched.size())}, kHost), 0);
  }

  void run_cpu() {
    for (size_t i = 0; i < segments.size(); ++i) {
      if (present[i] == 0) continue;
      const auto [start, stop, row, number, param_start] = segments[i];
      const Adam::Options& options = options_table()[static_cast<size_t>(row)];
      ++steps[i];
      const Adam::Step<double> step = Adam::fold(options, steps[i], 0.5);
      zx::kernels_scalar().update(
          {zx::RuleKind::adam, what.param, what.master, what.grad, param.at(start),
           what.master == Master::none ? nullptr : master.at(start), grad.at(start), Adam::num_states(options),
           moments.at(start), stop - start, param_start, zx::random_key(steps[i], number)},
          &step);
    }
  }

  void check_same(const Shard& expected, const std::string& name) const {
    const auto check = [&name](const Elements& a, const Elements& b, const char* part) {
      CHECK_FOR(joined({name, part}), a.differences(b) == 0);
      CHECK_FOR(joined({name, part}), a.canaries_live());
    };
    check(param, expected.param, "param");
    check(master, expected.master, "master");
    moments.check_same(expected.moments, name);
    CHECK_FOR(joined({name, "grad"}), grad.same_bytes(expected.grad));
    CHECK_FOR(joined({name, "steps"}), steps == expected.steps);
  }

  UpdateCase what;
  std::vector<Segment> segments;
  int64_t numel;
  Elements param;
  Elements master;
  Elements grad;
  StoredMoments moments;
  std::vector<uint8_t> present{};
  std::vector<int64_t> steps{};
};

void check_every_edge(StateKind state) {
  for (const UpdateCase& c : update_cases(state)) {
    for (const SegmentLayout& layout : state == StateKind::blockwise ? block_layouts() : segment_layouts()) {
      for (const int64_t offset : {0, 1}) {  // to 16 bytes, and not
        Shard expected(c, layout, offset);
        Shard tested = expected;
        expected.run_cpu();
        tested.run_cuda();
        tested.check_same(expected, joined({name_of(c), layout.name, offset == 0 ? "aligned" : "misaligned"}));
      }
    }
  }
}
TEST(update_gives_the_cpu_bits_for_every_dtype_and_segment_edge) { check_every_edge(StateKind::wide); }
TEST(update_gives_the_cpu_bits_with_bf16_moments) { check_every_edge(StateKind::bf16); }
TEST(update_gives_the_cpu_bits_with_8_bit_moments) { check_every_edge(StateKind::blockwise); }

// All layouts three times, aligned and not: more shards than one launch takes. Every fourth case; the tests above have
// all.
void check_together(StateKind state) {
  const auto& layouts = state == StateKind::blockwise ? block_layouts() : segment_layouts();
  const auto cases = update_cases(state);
  for (size_t which = 0; which < cases.size(); which += 4) {
    const UpdateCase& c = cases[which];
    std::vector<Shard> expected;
    for (const int64_t offset : {0, 1, 0}) {
      for (const SegmentLayout& layout : layouts) expected.emplace_back(c, layout, offset);
    }
    CHECK(expected.size() > size_t{zx::cuda::kMostTogether});
    std::vector<Shard> tested = expected;
    std::vector<Shard*> together;
    for (Shard& each : tested) together.push_back(&each);
    Shard::run_together(together);
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i].run_cpu();
      tested[i].check_same(expected[i], joined({name_of(c), layouts[i % layouts.size()].name, "together"}));
    }
  }
}
TEST(update_on_many_shards_at_once_gives_the_bits_of_each_alone) { check_together(StateKind::wide); }
TEST(update_on_many_shards_with_bf16_moments_gives_the_bits_of_each_alone) { check_together(StateKind::bf16); }
TEST(update_on_many_shards_with_8_bit_moments_gives_the_bits_of_each_alone) { check_together(StateKind::blockwise); }

TEST(update_gives_the_same_bits_in_every_order_of_threads) {
  for (const UpdateCase& c : {UpdateCase{DType::bf16, Master::remainder, DType::bf16, true},
                              UpdateCase{DType::f32, Master::none, DType::f32, false},
                              UpdateCase{DType::bf16, Master::remainder, DType::bf16, true, StateKind::bf16},
                              UpdateCase{DType::bf16, Master::remainder, DType::bf16, true, StateKind::blockwise}}) {
    for (const SegmentLayout& layout : c.state == StateKind::blockwise ? block_layouts() : segment_layouts()) {
      Shard expected(c, layout, 0);
      const Shard before = expected;
      expected.run_cpu();
      in_every_order([&] {
        Shard tested = before;
        tested.run_cuda();
        tested.check_same(expected, joined({name_of(c), layout.name}));
      });
    }
  }
}

// One pointer that is not aligned is enough to leave the wide path.
TEST(update_takes_any_one_misaligned_tensor) {
  for (const StateKind state : kStateKinds) {
    const UpdateCase c{DType::bf16, Master::remainder, DType::bf16, true, state};
    const SegmentLayout layout = with_blocks(layout_of("large", {5000}, 0, 0));
    for (int which = 0; which < 6; ++which) {
      Shard expected(c, layout, 0);
      const auto shifted = [&](Elements& elements) { elements = Elements::random(elements.dtype(), layout.numel, 3); };
      StoredMoments& moments = expected.moments;
      Elements* const all[] = {&expected.param,         &expected.master,           &expected.grad,
                               &moments.exp_avg.values, &moments.exp_avg_sq.values, &moments.max_exp_avg_sq.values};
      shifted(*all[which]);
      for (Segment& segment : expected.segments) segment.options_row = 1;
      Shard tested = expected;
      expected.run_cpu();
      tested.run_cuda();
      tested.check_same(expected, joined({name_of(c), "misaligned " + std::to_string(which)}));
    }
  }
}

// The rule in double, on the same inputs. The bound is that of tests/kernels/test_adam.py: arithmetic in T may make an
// error of kUpdateEpsilons of its epsilons, in units of what is added up on the way to the update; the parameter itself
// is rounded with its decay, in the product and in the sum.
TEST(update_is_close_to_the_rule_in_double) {
  using Lane = zx::ScalarLane<double>;
  constexpr double kUpdateEpsilons = 8.0;
  for (const UpdateCase& c : update_cases(StateKind::wide)) {
    if (c.param != DType::f64 && c.param != DType::f32 && c.master == Master::none) continue;  // rounds to 16 bits
    Shard before(c, layout_of("", {3000, 500, 37}, 0, 7), 0, /*finite=*/true);
    for (int64_t i = 0; i < before.numel; ++i) {
      StoredMoments& moments = before.moments;
      for (Elements* squares : {&moments.exp_avg_sq.values, &moments.max_exp_avg_sq.values}) squares->make_positive(i);
    }
    Shard after = before;
    after.run_cuda();
    for (size_t s = 0; s < before.segments.size(); ++s) {
      const Adam::Options& options = options_table()[static_cast<size_t>(before.segments[s].options_row)];
      const auto step = Adam::narrow<double>(Adam::fold(options, after.steps[s], 0.5));
      for (int64_t i = before.segments[s].start; i < before.segments[s].stop; ++i) {
        const double start = before.exact(i);
        const double exp_avg = before.moments.exp_avg.values.number(i);
        const Lane grad{before.grad.number(i)};
        const double exp_avg_sq = before.moments.exp_avg_sq.values.number(i);
        const double max_exp_avg_sq = before.moments.max_exp_avg_sq.values.number(i);
        zx::Lanes<Lane, 2> plain{{start}, {{exp_avg}, {exp_avg_sq}}};
        zx::Lanes<Lane, 3> largest{{start}, {{exp_avg}, {exp_avg_sq}, {max_exp_avg_sq}}};
        const bool amsgrad = Adam::num_states(options) == 3;
        amsgrad ? Adam::update(step, grad, largest) : Adam::update(step, grad, plain);
        const double expected = amsgrad ? largest.param.x : plain.param.x;
        const double second = amsgrad ? Adam::divisor(largest).x : Adam::divisor(plain).x;
        const double denom = std::sqrt(second) / step.bias_correction2_sqrt + step.eps;
        const double added = std::fabs(step.neg_step_size) * (std::fabs(exp_avg) + std::fabs(grad.x)) / denom;
        const double epsilon = c.param == DType::f64 ? 0x1p-53 : 0x1p-24;
        const double allowed =
            epsilon * (kUpdateEpsilons * added + 3 * std::max(std::fabs(start), std::fabs(expected)));
        CHECK_FOR(name_of(c), std::fabs(after.exact(i) - expected) <= allowed);
      }
    }
  }
}

}  // namespace
