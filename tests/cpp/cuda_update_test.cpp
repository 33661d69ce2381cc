// The CUDA update, run on the host: the bits of the CPU's over all rules, dtypes, segments, alignments and orders of
// threads.
#include <algorithm>

#include "cuda_shards.h"
#include "math/dynamic_map.h"
#include "math/scalar_lane.h"
#include "update_cases.h"

namespace {

using namespace zx::testing;
using zx::Adam;
using zx::DType;
using zx::Master;
using zx::Segment;
using zx::StateKind;

// The options table of a shard of this case: rows with as many states as the shard has, and with fewer.
template <class Rule>
std::vector<typename Rule::Options> options_table(const UpdateCase& c) {
  std::vector<typename Rule::Options> rows;
  for (int count = Rule::kLeastStates; count <= c.of.num_states; ++count) {
    for (const auto& row : options_tried<Rule>(count)) rows.push_back(row);
  }
  return rows;
}

// Calls body(Type<Rule>{}, the table).
template <class Body>
auto with_options(const UpdateCase& c, const Body& body) {
  return zx::with_rule(c.of.rule, [&](auto type) {
    const auto rows = options_table<typename decltype(type)::type>(c);
    return body(type, rows);
  });
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
        states(c, layout.numel, offset, finite) {
    make_masters(c, numel, param, master);
    const size_t num_rows = with_options(c, [](auto, const auto& rows) { return rows.size(); });
    for (size_t i = 0; i < segments.size(); ++i) {
      segments[i].options_row = static_cast<int64_t>(i % num_rows);
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

  zx::KeptBits kept(int64_t start) const { return mask.empty() ? zx::KeptBits{} : zx::KeptBits{mask.data(), start}; }

  void run_cuda() { run_together({this}); }

  static void run_together(const std::vector<Shard*>& shards) {
    const double scale = 0.5;
    std::vector<std::vector<char>> scratch;
    std::vector<zx::cuda::UpdateShard> launched;
    with_options(shards.front()->what, [&](auto, const auto& rows) {
      for (Shard* s : shards) {
        const UpdateCase& what = s->what;
        scratch.emplace_back(s->segments.size() * zx::cuda::kFoldedBytes, static_cast<char>(0xcd));
        launched.push_back({{what.of.rule, what.param, what.master, what.grad, s->param.at(0),
                             what.master == Master::none ? nullptr : s->master.at(0), s->grad.at(0), s->states.at(0),
                             s->numel, s->kept(0)},
                            {s->segments.data(), static_cast<int64_t>(s->segments.size()), s->present.data(),
                             s->steps.data(), &rows.front().lr, &scale, scratch.back().data()}});
      }
      CHECK_EQ(zx::cuda::update({launched.data(), static_cast<int64_t>(launched.size())}, kHost), 0);
    });
  }

  void run_cpu() {
    with_options(what, [&](auto type, const auto& rows) {
      using Rule = typename decltype(type)::type;
      for (size_t i = 0; i < segments.size(); ++i) {
        if (present[i] == 0) continue;
        const auto [start, stop, row, number, param_start] = segments[i];
        const auto& options = rows[static_cast<size_t>(row)];
        if (Rule::counts_step(options)) ++steps[i];
        const auto step = Rule::fold(options, steps[i], 0.5);
        zx::kernels_scalar().update({what.of.rule,
                                     what.param,
                                     what.master,
                                     what.grad,
                                     param.at(start),
                                     what.master == Master::none ? nullptr : master.at(start),
                                     grad.at(start),
                                     Rule::num_states(options),
                                     states.at(start),
                                     stop - start,
                                     {param_start, zx::random_key(steps[i], number)},
                                     kept(start)},
                                    &step);
      }
    });
  }

  void check_same(const Shard& expected, const std::string& name) const {
    const auto check = [&name](const Elements& a, const Elements& b, const char* part) {
      CHECK_FOR(joined({name, part}), a.differences(b) == 0);
      CHECK_FOR(joined({name, part}), a.canaries_live());
    };
    check(param, expected.param, "param");
    check(master, expected.master, "master");
    states.check_same(expected.states, name);
    CHECK_FOR(joined({name, "grad"}), grad.same_bytes(expected.grad));
    CHECK_FOR(joined({name, "steps"}), steps == expected.steps);
  }

  UpdateCase what;
  std::vector<Segment> segments;
  int64_t numel;
  Elements param;
  Elements master;
  Elements grad;
  AllStates states;
  std::vector<uint8_t> present{};
  std::vector<int64_t> steps{};
  std::vector<uint8_t> mask{};
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
// With half of the elements cleared.
void check_masked(StateKind state) {
  std::vector<SegmentLayout> layouts{layout_of("blocks and around them", {256, 255, 257, 512, 1, 511}, 3, 1),
                                     layout_of("tails", {0, 1, 7, 8, 9, 31, 249, 255}, 0, 5)};
  for (SegmentLayout& layout : layouts) {
    if (state == StateKind::blockwise) layout = with_blocks(layout);
    for (const UpdateCase& c : update_cases(state)) {
      Shard expected(c, layout, 0);
      expected.mask = random_mask(layout.numel, 0);
      Shard tested = expected;
      expected.run_cpu();
      tested.run_cuda();
      tested.check_same(expected, joined({name_of(c), layout.name}));
    }
  }
}

// Elements of Adam's that no gradient has ever reached, between others: zeros of either sign in gradients, first
// moments and parameters.
void check_at_rest(StateKind state) {
  SegmentLayout layout = layout_of("tiles", {2048, 256, 2304, 256, 512, 256, 256, 2048}, 0, 0);
  const auto zero_code = [](const zx::DynamicMap& map) {
    return static_cast<uint64_t>(std::find(std::begin(map.values), std::end(map.values), 0.0f) - map.values);
  };
  static constexpr zx::DynamicMap kOfFirst = zx::make_dynamic_map(true);
  static constexpr zx::DynamicMap kOfSecond = zx::make_dynamic_map(false);
  const std::array<uint64_t, 2> zero_codes{zero_code(kOfFirst), zero_code(kOfSecond)};
  for (const UpdateCase& c : update_cases(state)) {
    if (c.of.rule != zx::RuleKind::adam) continue;
    Shard expected(c, layout, 0, /*finite=*/true);
    for (int64_t i = 0; i < layout.numel; ++i) {
      const uint64_t bits = random_bits();
      const bool rests = bits % 5 != 0;
      if (rests) expected.grad.make_zero(i, (bits >> 8 & 1) != 0);
      if (rests && bits % 5 == 1 && c.master == Master::none) expected.param.make_zero(i, (bits >> 9 & 1) != 0);
      for (size_t s = 0; s < expected.states.each.size(); ++s) {
        Elements& moment = expected.states.each[s].values;
        if (rests && state == StateKind::blockwise) {
          moment.set(i, zero_codes[s == Adam::kExpAvg ? 0 : 1]);
        } else if (rests) {
          moment.make_zero(i, s == Adam::kExpAvg && (bits >> 10 & 1) != 0);
        } else if (s != Adam::kExpAvg) {
          moment.make_positive(i);
        }
      }
    }
    Shard tested = expected;
    expected.run_cpu();
    tested.run_cuda();
    tested.check_same(expected, joined({name_of(c), "at rest"}));
  }
}
TEST(elements_at_rest_have_the_cpu_bits) { check_at_rest(StateKind::wide); }
TEST(elements_at_rest_have_the_cpu_bits_with_bf16_states) { check_at_rest(StateKind::bf16); }
TEST(elements_at_rest_have_the_cpu_bits_with_8_bit_states) { check_at_rest(StateKind::blockwise); }

TEST(a_mask_clears_what_it_clears_on_the_cpu) { check_masked(StateKind::wide); }
TEST(a_mask_clears_bf16_states) { check_masked(StateKind::bf16); }
TEST(a_mask_clears_8_bit_states) { check_masked(StateKind::blockwise); }

TEST(update_gives_the_cpu_bits_for_every_rule_dtype_and_segment_edge) { check_every_edge(StateKind::wide); }
TEST(update_gives_the_cpu_bits_with_bf16_states) { check_every_edge(StateKind::bf16); }
TEST(update_gives_the_cpu_bits_with_8_bit_states) { check_every_edge(StateKind::blockwise); }

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
TEST(update_on_many_shards_with_bf16_states_gives_the_bits_of_each_alone) { check_together(StateKind::bf16); }
TEST(update_on_many_shards_with_8_bit_states_gives_the_bits_of_each_alone) { check_together(StateKind::blockwise); }

TEST(update_gives_the_same_bits_in_every_order_of_threads) {
  std::vector<UpdateCase> cases{{DType::f32, Master::none, DType::f32, {zx::RuleKind::adam, 2}}};
  for (const zx::RuleFacts& rule : zx::kRules) {
    const Variant of{rule.kind, static_cast<int>(rule.most_states)};
    for (const StateKind state : kStateKinds) {
      cases.push_back({DType::bf16, Master::remainder, DType::bf16, of, state});
    }
  }
  for (const UpdateCase& c : cases) {
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
  for (const zx::RuleFacts& rule : zx::kRules) {
    for (const StateKind state : kStateKinds) {
      const Variant of{rule.kind, static_cast<int>(rule.most_states)};
      const UpdateCase c{DType::bf16, Master::remainder, DType::bf16, of, state};
      const SegmentLayout layout = with_blocks(layout_of("large", {5000}, 0, 0));
      for (size_t which = 0; which < 3 + rule.most_states; ++which) {
        Shard expected(c, layout, 0);
        std::vector<Elements*> all{&expected.param, &expected.master, &expected.grad};
        for (StateElements& each : expected.states.each) all.push_back(&each.values);
        *all[which] = Elements::random(all[which]->dtype(), layout.numel, 3);
        const size_t num_rows = with_options(c, [](auto, const auto& rows) { return rows.size(); });
        for (Segment& segment : expected.segments) segment.options_row = static_cast<int64_t>(num_rows) - 1;
        Shard tested = expected;
        expected.run_cpu();
        tested.run_cuda();
        tested.check_same(expected, joined({name_of(c), "misaligned " + std::to_string(which)}));
      }
    }
  }
}

// Adam in double, on the same inputs. The bound is that of tests/kernels/rule.py: arithmetic in T may make an
// error of kUpdateEpsilons of its epsilons, in units of what is added up on the way to the update; the parameter itself
// is rounded with its decay, in the product and in the sum.
TEST(update_is_close_to_adam_in_double) {
  using Lane = zx::ScalarLane<double>;
  constexpr double kUpdateEpsilons = 8.0;
  for (const UpdateCase& c : update_cases(StateKind::wide)) {
    if (c.of.rule != zx::RuleKind::adam) continue;
    if (c.param != DType::f64 && c.param != DType::f32 && c.master == Master::none) continue;  // rounds to 16 bits
    Shard before(c, layout_of("", {3000, 500, 37}, 0, 7), 0, /*finite=*/true);
    for (int64_t i = 0; i < before.numel; ++i) {
      for (size_t s = 1; s < before.states.each.size(); ++s) before.states.each[s].values.make_positive(i);
    }
    Shard after = before;
    after.run_cuda();
    for (size_t s = 0; s < before.segments.size(); ++s) {
      const Adam::Options options = options_table<Adam>(c)[static_cast<size_t>(before.segments[s].options_row)];
      const auto step = Adam::narrow<double>(Adam::fold(options, after.steps[s], 0.5));
      for (int64_t i = before.segments[s].start; i < before.segments[s].stop; ++i) {
        const double start = before.exact(i);
        const auto state = [&](int which) { return before.states.each[static_cast<size_t>(which)].values.number(i); };
        const double exp_avg = state(Adam::kExpAvg);
        const Lane grad{before.grad.number(i)};
        const double exp_avg_sq = state(Adam::kExpAvgSq);
        const double max_exp_avg_sq = state(Adam::kMaxExpAvgSq);
        zx::Lanes<Lane, 2> plain{{start}, {{exp_avg}, {exp_avg_sq}}};
        zx::Lanes<Lane, 3> largest{{start}, {{exp_avg}, {exp_avg_sq}, {max_exp_avg_sq}}};
        const bool amsgrad = Adam::num_states(options) == 3;
        amsgrad ? Adam::update(step, grad, largest) : Adam::update(step, grad, plain);
        const double expected = amsgrad ? largest.param.x : plain.param.x;
        const double second = amsgrad ? Adam::second_moment(largest).x : Adam::second_moment(plain).x;
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
