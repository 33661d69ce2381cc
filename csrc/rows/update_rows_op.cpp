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
  const Master kind = check_update_rows(facts, {values, master, grads, states, step, rows, places}, options);
  const TouchedRows touched{.count = rows.numel(),
                            .width = values.size(1),
                            .rows = rows.const_data_ptr<int64_t>(),
                            .places = places.const_data_ptr<int64_t>(),
                            .grads = grads.const_data_ptr<float>(),
                            .dtype = dtype_of(values, "update_rows_", "values"),
                            .values = values.mutable_data_ptr(),
                            .master_kind = kind,
                            .master = master ? master->mutable_data_ptr() : nullptr};
  update_rows({facts.kind, options.vec(), scale, limit}, states.vec(), step, touched, nullptr);
}

}  // namespace

TORCH_LIBRARY_IMPL(zerox, CPU, m) { m.impl("update_rows_", &update_rows_); }

}  // namespace zx
