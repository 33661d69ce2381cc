// What the kernel tests know of each rule: options that take all of its branches.
#pragma once

#include <vector>

#include "math/rules.h"

namespace zx::testing {

// Rows with `num_states` states each, or none if the rule never keeps so many.
template <class Rule>
std::vector<typename Rule::Options> options_tried(int num_states);

template <>
inline std::vector<Adam::Options> options_tried<Adam>(int num_states) {
  const double amsgrad = num_states == 3 ? 1.0 : 0.0;
  return {{1e-3, 0.9, 0.999, 1e-8, 1e-2, 0.0, 1.0, amsgrad},  // AdamW
          {1e-2, 0.9, 0.95, 1e-6, 1e-1, 1.0, 0.0, amsgrad},   // L2, maximize
          {1e-3, 0.3, 0.999, 1e-8, 0.0, 0.0, 0.0, amsgrad},   // lerp from the gradient
          {1e-3, 0.9, 0.999, 0.0, 1e-2, 0.0, 0.0, amsgrad}};  // no eps: 0 / 0 without a gradient
}

template <>
inline std::vector<Sgd::Options> options_tried<Sgd>(int num_states) {
  if (num_states == 0) return {{1e-1, 0.0, 0.0, 0.0, 0.0, 0.0}, {1e-2, 0.0, 0.5, 1e-1, 0.0, 1.0}};
  return {{1e-1, 0.9, 0.0, 1e-2, 0.0, 0.0},   // L2
          {1e-2, 0.5, 0.3, 0.0, 0.0, 1.0},    // dampening, maximize
          {1e-1, 0.95, 0.0, 0.0, 1.0, 0.0}};  // Nesterov
}

template <>
inline std::vector<Lion::Options> options_tried<Lion>(int /*num_states*/) {
  return {{1e-3, 0.9, 0.99, 1e-1, 0.0}, {1e-2, 0.5, 0.3, 0.0, 1.0}};  // decay; maximize
}

// A rule with so many states.
struct Variant {
  RuleKind rule;
  int num_states;
};
inline std::vector<Variant> variants() {
  std::vector<Variant> found;
  for (const RuleFacts& rule : kRules) {
    for (auto count = rule.least_states; count <= rule.most_states; ++count) {
      found.push_back({rule.kind, static_cast<int>(count)});
    }
  }
  return found;
}

inline const char* name_of(RuleKind kind) {
  return with_rule(kind, [](auto type) { return decltype(type)::type::kName; });
}

}  // namespace zx::testing
