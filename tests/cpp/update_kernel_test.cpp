// The update: every instruction set gives the scalar bits, whatever the rule, dtypes, kinds of states, options and
// places where spans are cut. What the scalar kernel computes is held against torch in tests/kernels.
#include "update_cases.h"

namespace {

using namespace zx::testing;
using zx::DType;
using zx::Master;
using zx::StateKind;

// Everything one call reads and writes.
struct UpdateBuffers {
  UpdateBuffers(const UpdateCase& c, int64_t numel, int64_t offset)
      : what(c),
        param(Elements::random(c.param, numel, offset)),
        master(Elements::random(master_dtype(c), numel, offset + 1)),
        grad(Elements::random(c.grad, numel, offset + 2)),
        states(c, numel, offset) {
    make_masters(c, numel, param, master);
  }

  // `step`: the Step<double> of the case's rule.
  void run(const zx::KernelTable& table, const void* step, int64_t start, int64_t stop) {
    table.update({what.of.rule,
                  what.param,
                  what.master,
                  what.grad,
                  param.at(start),
                  what.master == Master::none ? nullptr : master.at(start),
                  grad.at(start),
                  what.of.num_states,
                  states.at(start),
                  stop - start,
                  {kParamStart + start, kKey},
                  mask.empty() ? zx::KeptBits{} : kept().from(start)},
                 step);
  }

  zx::KeptBits kept() const { return {mask.data(), kFirstBit}; }
  void clear_masked() {
    param.clear_masked(kept());
    if (what.master != Master::none) master.clear_masked(kept());
    states.clear_masked(kept());
  }

  void check_same(const UpdateBuffers& expected, const std::string& name) const {
    const auto check = [&name](const Elements& a, const Elements& b, const char* part) {
      CHECK_FOR(joined({name, part}), a.differences(b) == 0);
      CHECK(a.canaries_live());
    };
    check(param, expected.param, "param");
    check(master, expected.master, "master");
    states.check_same(expected.states, name);
    CHECK(grad.same_bytes(expected.grad));
  }

  UpdateCase what;
  Elements param;
  Elements master;
  Elements grad;
  AllStates states;
  std::vector<uint8_t> mask{};

  static constexpr int64_t kFirstBit = 13;  // a mask's bytes and an update's vectors begin anywhere
  // The lower half of an element's index overflows within the span.
  static constexpr int64_t kParamStart = (int64_t{1} << 32) - 50;
  static constexpr zx::RandomKey kKey{0x12345678, 0x9abcdef0};
};

// Calls body with the folded constants of a later step, under the first row of the case's options.
template <class Body>
void with_step(const UpdateCase& c, const Body& body) {
  zx::with_rule(c.of.rule, [&](auto type) {
    using Rule = typename decltype(type)::type;
    const auto step = Rule::fold(options_tried<Rule>(c.of.num_states).front(), 3, 0.5);
    body(&step);
  });
}
// Also at the first step, and under every row.
template <class Body>
void for_each_step(const UpdateCase& c, const Body& body) {
  zx::with_rule(c.of.rule, [&](auto type) {
    using Rule = typename decltype(type)::type;
    int64_t count = 1;
    for (const auto& options : options_tried<Rule>(c.of.num_states)) {
      const auto step = Rule::fold(options, count, 1.0);
      body(&step);
      count += 500;
    }
  });
  with_step(c, body);
}

TEST(update_gives_the_scalar_bits_for_every_rule_dtype_and_option) {
  const auto tables = vector_tables();
  size_t round = 0;
  for (const StateKind state : kStateKinds) {
    for (const UpdateCase& c : update_cases(state)) {
      for (const int64_t numel : kSizes) {
        for_each_step(c, [&](const void* step) {
          const UpdateBuffers before(c, numel, static_cast<int64_t>(round++ % 4));
          UpdateBuffers expected = before;
          expected.run(zx::kernels_scalar(), step, 0, numel);
          expected.check_same(expected, "scalar");  // canaries
          CHECK(expected.grad.same_bytes(before.grad));
          for (const zx::KernelTable* table : tables) {
            UpdateBuffers tested = before;
            tested.run(*table, step, 0, numel);
            tested.check_same(expected, joined({table->name, name_of(c)}));
          }
        });
      }
    }
  }
}

TEST(update_may_be_cut_anywhere) {
  for (const std::string& isa : zx::supported_isas()) {
    zx::select_isa(isa);
    for (const StateKind state : kStateKinds) {
      // Up to a vector's elements, or up to the blocks that are converted together; the last block is half a block.
      const bool in_blocks = state == StateKind::blockwise;
      const int64_t unit = in_blocks ? zx::kStateBlock : 1;
      const int64_t numel = in_blocks ? 10 * unit - unit / 2 : 100;
      const std::vector<int64_t> cuts =
          in_blocks ? std::vector<int64_t>{0, 1, 3, 4, 6, 9, 10} : std::vector<int64_t>{0, 1, 13, 16, 50, 99, 100};
      for (const UpdateCase& c : update_cases(state)) {
        const UpdateBuffers before(c, numel, 1);
        with_step(c, [&](const void* step) {
          UpdateBuffers whole = before;
          whole.run(zx::kernels(), step, 0, numel);
          for (const int64_t cut : cuts) {
            const int64_t place = std::min(cut * unit, numel);
            UpdateBuffers parts = before;
            parts.run(zx::kernels(), step, place, numel);
            parts.run(zx::kernels(), step, 0, place);
            parts.check_same(whole, joined({isa, name_of(c)}));
          }
        });
      }
    }
  }
}

TEST(what_a_mask_does_not_keep_is_cleared) {
  auto tables = vector_tables();
  tables.push_back(&zx::kernels_scalar());
  for (const StateKind state : kStateKinds) {
    const bool in_blocks = state == StateKind::blockwise;
    for (const UpdateCase& c : update_cases(state)) {
      for (const int64_t numel : {37, 1300}) {
        UpdateBuffers before(c, numel, 1);
        before.mask = random_mask(numel, UpdateBuffers::kFirstBit);
        UpdateBuffers expected = before;
        if (in_blocks) {  // nothing masked has a part in a scale
          expected.clear_masked();
          expected.grad.clear_masked(before.kept());
        }
        expected.mask.clear();
        with_step(c, [&](const void* step) {
          expected.run(zx::kernels_scalar(), step, 0, numel);
          expected.mask = before.mask;
          expected.clear_masked();
          expected.grad = before.grad;
          for (const zx::KernelTable* table : tables) {
            UpdateBuffers tested = before;
            tested.run(*table, step, 0, numel);
            tested.check_same(expected, joined({table->name, name_of(c)}));
          }
        });
      }
    }
  }
}

#if defined(__SANITIZE_ADDRESS__)
constexpr int kRemainderStride = 4099;  // thinned; the plain build takes all 2^32 pairs
#else
constexpr int kRemainderStride = 1;
#endif

// Whether this pair ended as its master split again. Zeros keep no sign here: -0 + -0 * lr / eps is -0 + +0 or -0 + -0,
// whatever the sign of the step.
bool is_split_again(uint16_t pattern, int16_t remainder, uint16_t param_after, int16_t remainder_after) {
  const zx::SplitMaster split = zx::split_master(zx::join_master({pattern}, remainder));
  if (((split.param.bits & 0x7fff) | split.remainder) == 0) return ((param_after & 0x7fff) | remainder_after) == 0;
  return param_after == split.param.bits && remainder_after == split.remainder;
}

// The one place where a bit pattern of a master decides what the next step starts from: a step that adds nothing, on
// every master there is and on the pairs that none has.
TEST(every_pair_of_parameter_and_remainder_is_joined_and_split_alike) {
  constexpr int64_t kPatterns = 0x10000;
  const auto nothing = zx::Adam::fold({0.0, 0.9, 0.999, 1.0, 0.0, 0.0, 1.0, 0.0}, 1, 1.0);
  UpdateBuffers buffers({DType::bf16, Master::remainder, DType::bf16, {zx::RuleKind::adam, 2}}, kPatterns, 0);
  std::vector<uint16_t> patterns(kPatterns);
  for (int64_t i = 0; i < kPatterns; ++i) {
    patterns[static_cast<size_t>(i)] = static_cast<uint16_t>(i);
    for (Elements* zero : {&buffers.grad, &buffers.states.each[0].values, &buffers.states.each[1].values}) {
      zero->set(i, 0);
    }
  }
  std::vector<int16_t> remainders(kPatterns);
  const auto* params_after = reinterpret_cast<const uint16_t*>(buffers.param.at(0));
  const auto* remainders_after = reinterpret_cast<const int16_t*>(buffers.master.at(0));
  const auto unchanged = [&](size_t first, size_t last) {
    const size_t bytes = (last - first) * sizeof(uint16_t);
    return std::memcmp(params_after + first, patterns.data() + first, bytes) == 0 &&
           std::memcmp(remainders_after + first, remainders.data() + first, bytes) == 0;
  };
  for (const std::string& isa : zx::supported_isas()) {
    zx::select_isa(isa);
    // The scalar kernel runs the header that rounding_test.cpp sweeps, and VBMI is for states in 8 bits: the edges are
    // enough.
    const int stride = isa == "scalar" || isa == "avx512vbmi" ? 32767 : kRemainderStride;
    int64_t num_wrong = 0;
    for (int remainder = -32768; remainder < 32768; remainder += stride) {
      const auto before = static_cast<int16_t>(remainder);
      std::fill(remainders.begin(), remainders.end(), before);
      std::memcpy(buffers.param.at(0), patterns.data(), kPatterns * sizeof(uint16_t));
      std::memcpy(buffers.master.at(0), remainders.data(), kPatterns * sizeof(int16_t));
      buffers.run(zx::kernels(), &nothing, 0, kPatterns);
      // Finite parameters other than zero are some master's, whatever the remainder.
      num_wrong += !unchanged(0x0001, 0x7f80) + !unchanged(0x8001, 0xff80);
      for (const auto& [first, last] : {std::pair{0x0000, 0x0001}, {0x7f80, 0x8001}, {0xff80, 0x10000}}) {
        for (int i = first; i < last; ++i) {
          num_wrong += !is_split_again(static_cast<uint16_t>(i), before, params_after[i], remainders_after[i]);
        }
      }
    }
    CHECK_FOR(isa, num_wrong == 0);
  }
}

}  // namespace
