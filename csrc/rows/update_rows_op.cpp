// zerox::update_rows_ on the CPU: what RowTables does to a table, for tensors that somebody else moves.
#include <torch/library.h>

#include "op_arguments.h"
#include "rows/row_rule.h"

namespace zx {
namespace {

void update_rows_(c10::string_view rule, at::Tensor& values, const std::optional<at::Tensor>& master,
                  const at::Tensor& grads, at::TensorList states, at::Tensor& step, const at::Tensor& rows,
                  const at::Tensor& places, at::ArrayRef<double> options, double scale, double limit) {
  const RuleFacts& facts = rule_named(rule, "update_rows_");
  const TouchedRows touched = check_update_rows(facts, {values, master, grads, states, step, rows, places}, options);
  update_rows({facts.kind, options.vec(), scale, limit}, RowStates::of(states.vec(), {}, 0), step, touched,
              touched.rows, nullptr);
}

}  // namespace

TORCH_LIBRARY_IMPL(zerox, CPU, m) { m.impl("update_rows_", &update_rows_); }

}  // namespace zx
