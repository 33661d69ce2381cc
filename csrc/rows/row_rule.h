// The update of the rows of a table that a step touches, by any rule. It is lazy: all other rows, and their states,
// stay as they are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "math/rules.h"
#include "math/touched_rows.h"

namespace zx {

// How one table is updated. Gradients are multiplied by `scale` first, and cut at `limit`.
struct RowRule {
  RuleKind kind;
  std::vector<double> options;  // of a param group: the rule's Options
  double scale;
  double limit;  // infinite if there is none

  // Throws c10::ValueError for a rule that there is not, or another number of options than it has.
  static RowRule named(const std::string& name, std::vector<double> options, double scale, double limit);
};

// What a rule keeps of rows, by place: `values` [rows, width] of float32, bfloat16, or uint8 codes with `scales`,
// float32 [rows, ceil(width / 256)] for each. So a row is a parameter of its own, whose blocks begin with it.
// `table`: its number among the parameters, for what is rounded at random.
struct RowStates {
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> scales;
  int64_t table;
  StateKind kind;

  // At the door: their dtype says of which kind they are. Throws c10::ValueError for one that they can't have.
  static RowStates of(std::vector<at::Tensor> values, std::vector<at::Tensor> scales, int64_t table);
  // Throws c10::ValueError for states that are not alike, or not of this many rows.
  void check(int64_t num_rows, int64_t width) const;
};

// `states`: the table's; `touched` has none yet. `numbers`: those of the touched rows in the whole table. `step`,
// int64, counts up if the rule counts updates. `updated` gets the rows' new values, side by side; it may be null.
//
// 16-bit rows are updated in float: their masters are, if there are any, and a row is its master, rounded. A row that
// was written since is its own master.
//
// Adam is the lazy one of torch.optim.SparseAdam, with its bits, if states are float32. Else rules are those of dense
// parameters: a row gets the bits that it would have in one, as long as it is touched in every step. (Adam's options
// say then what makes it the lazy one: see of_rows() in zerox/rules/adam.py.)
void update_rows(const RowRule& by, const RowStates& states, const at::Tensor& step, TouchedRows touched,
                 const int64_t* numbers, void* updated);

}  // namespace zx
