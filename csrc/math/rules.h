// All rules that there are kernels for, for code that learns at run time which one is meant. A new rule needs a header,
// and a line in each of three places below.
#pragma once

#include <cstddef>
#include <cstdint>

#include "math/adam.h"
#include "math/lion.h"
#include "math/rule.h"
#include "math/sgd.h"
#include "math/state.h"

namespace zx {

enum class RuleKind : uint8_t { adam, sgd, lion };

// Calls body(Type<Rule>{}) and returns what that returns.
ZX_FOR_ANY_BODY
template <class Body>
ZX_HD auto with_rule(RuleKind rule, const Body& body) {
  switch (rule) {
    case RuleKind::adam:
      return body(Type<Adam>{});
    case RuleKind::sgd:
      return body(Type<Sgd>{});
    case RuleKind::lion:
      return body(Type<Lion>{});
  }
  __builtin_unreachable();
}

// What the checks at the door of the ops know of a rule.
struct RuleFacts {
  RuleKind kind;
  const char* name;
  size_t least_states;
  size_t most_states;
  int64_t option_columns;
};

template <class Rule>
constexpr RuleFacts facts_of(RuleKind kind) {
  static_assert(Rule::kLeastStates <= kMostStatesOf<Rule> && kMostStatesOf<Rule> <= kMostStates);
  static_assert(sizeof(typename Rule::Options) % sizeof(double) == 0);
  return {kind, Rule::kName, Rule::kLeastStates, kMostStatesOf<Rule>, sizeof(typename Rule::Options) / sizeof(double)};
}

inline constexpr RuleFacts kRules[] = {
    facts_of<Adam>(RuleKind::adam),
    facts_of<Sgd>(RuleKind::sgd),
    facts_of<Lion>(RuleKind::lion),
};

}  // namespace zx
