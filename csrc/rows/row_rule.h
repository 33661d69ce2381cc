// The update of the rows of a table that a step touches, by any rule. It is lazy: all other rows, and their states,
// stay as they are.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "math/dtype.h"
#include "math/rules.h"

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

// Row rows[i] of the table has its states and its master at place places[i], and its gradient is number i.
struct TouchedRows {
  int64_t count;
  int64_t width;
  const int64_t* rows;
  const int64_t* places;
  const float* grads;
  DType dtype;  // of the values
  void* values;
  Master master_kind;
  void* master;                              // null if none is kept
  std::array<float*, kMostStates> states{};  // null after those that the rule keeps

  int64_t row_bytes() const { return width * width_of(dtype); }
  char* value(int64_t i) const { return static_cast<char*>(values) + rows[i] * row_bytes(); }
  void* master_of(int64_t i) const {
    const int64_t bytes = master_kind == Master::fp32 ? 4 : 2;
    return master == nullptr ? nullptr : static_cast<char*>(master) + places[i] * width * bytes;
  }
};

// `states`: the table's, see TableSpec; `touched` has none yet. `step`, int64, counts up if the rule counts updates.
// `updated` gets the rows' new values, side by side; it may be null.
//
// 16-bit rows are updated in float: their masters are, if there are any, and a row is its master, rounded. A row that
// was written since is its own master.
//
// Adam is the lazy one of torch.optim.SparseAdam, with its bits. The other rules are those of dense parameters: a row
// gets the bits that it would have in one, as long as it is touched in every step.
void update_rows(const RowRule& by, const std::vector<at::Tensor>& states, const at::Tensor& step, TouchedRows touched,
                 void* updated);

}  // namespace zx
