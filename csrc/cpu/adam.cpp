// zerox::adam_ on the CPU: one pass from a gradient shard to state, master and parameter.
#include <torch/library.h>

#include "cpu/spans.h"

namespace zx {
namespace {

Master master_kind(const at::Tensor& param, const std::optional<at::Tensor>& master) {
  constexpr const char* op = "adam_";
  if (!master) return Master::none;
  ZX_CHECK_NUMEL(*master, param.numel(), op, "master");
  ZX_CHECK_CONTIGUOUS(*master, op, "master");
  const bool half = param.scalar_type() == at::kHalf || param.scalar_type() == at::kBFloat16;
  if (half && master->scalar_type() == at::kFloat) return Master::fp32;
  ZX_CHECK(param.scalar_type() == at::kBFloat16 && master->scalar_type() == at::kShort, op, "master",
           "must be float32 beside a 16-bit parameter or int16 beside bfloat16, got ", master->scalar_type(),
           " beside ", param.scalar_type());
  return Master::remainder;
}

void check_moment(const at::Tensor& moment, const at::Tensor& param, const char* argument) {
  const auto dtype = param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  check_array(moment, dtype, param.numel(), "adam_", argument);
}

// A segment whose `present` is 0 is left alone, its step count too, as torch leaves a parameter without gradient.
void adam_(at::Tensor& param, const std::optional<at::Tensor>& master, const at::Tensor& grad, at::Tensor& exp_avg,
           at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& max_exp_avg_sq, const at::Tensor& segments,
           const at::Tensor& present, at::Tensor& steps, const at::Tensor& options,
           const std::optional<at::Tensor>& grad_scale) {
  constexpr const char* op = "adam_";
  const DType param_dtype = dtype_of(param, op, "param");
  const DType grad_dtype = dtype_of(grad, op, "grad");
  ZX_CHECK(grad_dtype != DType::f64 || param_dtype == DType::f64, op, "grad", "must not be float64 beside ",
           param.scalar_type());
  ZX_CHECK_CONTIGUOUS(param, op, "param");
  ZX_CHECK_CONTIGUOUS(grad, op, "grad");
  ZX_CHECK_NUMEL(grad, param.numel(), op, "grad");
  const Master kind = master_kind(param, master);
  check_moment(exp_avg, param, "exp_avg");
  check_moment(exp_avg_sq, param, "exp_avg_sq");
  if (max_exp_avg_sq) check_moment(*max_exp_avg_sq, param, "max_exp_avg_sq");
  const SegmentTable table(segments, param.numel(), op);
  check_array(present, at::kByte, table.size(), op, "present");
  check_array(steps, at::kLong, table.size(), op, "steps");
  ZX_CHECK_DTYPE(options, at::kDouble, op, "options");
  ZX_CHECK(options.dim() == 2 && options.size(1) == kAdamOptionsColumns && options.is_contiguous(), op, "options",
           "must be [groups, ", kAdamOptionsColumns, "], got ", options.sizes());
  if (grad_scale) check_array(*grad_scale, at::kDouble, 1, op, "grad_scale");
  const auto* rows = reinterpret_cast<const AdamOptions*>(options.const_data_ptr<double>());
  for (int64_t i = 0; i < table.size(); ++i) {
    const int64_t row = table[i].options_row;
    ZX_CHECK(row >= 0 && row < options.size(0), op, "segments", "row ", i, " names options ", row, " of ",
             options.size(0));
    ZX_CHECK(rows[row].amsgrad == 0.0 || max_exp_avg_sq, op, "max_exp_avg_sq", "is needed by options row ", row);
  }

  const double scale = grad_scale ? *grad_scale->const_data_ptr<double>() : 1.0;
  const auto* takes_part = present.const_data_ptr<uint8_t>();
  auto* step_counts = steps.mutable_data_ptr<int64_t>();
  std::vector<AdamStep<double>> folded(static_cast<size_t>(table.size()));
  for (int64_t i = 0; i < table.size(); ++i) {
    if (takes_part[i] == 0) continue;
    const int64_t row = table[i].options_row;
    ++step_counts[i];
    // Neighbours mostly share options and count: the powers are folded once for a run of them.
    const bool same =
        i > 0 && takes_part[i - 1] != 0 && table[i - 1].options_row == row && step_counts[i - 1] == step_counts[i];
    folded[i] = same ? folded[i - 1] : fold_adam(rows[row], step_counts[i], scale);
  }
  const std::vector<Stretch> stretches = split_into_stretches(table);
  parallel_stretches(stretches, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const auto [segment, start, stop] = stretches[i];
      if (takes_part[segment] == 0) continue;
      const bool amsgrad = rows[table[segment].options_row].amsgrad != 0.0;
      const auto at_start = [start](const std::optional<at::Tensor>& tensor) {
        return tensor ? bytes_at(*tensor, start) : nullptr;
      };
      kernels().adam(
          {param_dtype, kind, grad_dtype, amsgrad, bytes_at(param, start), at_start(master), bytes_at(grad, start),
           bytes_at(exp_avg, start), bytes_at(exp_avg_sq, start), at_start(max_exp_avg_sq), stop - start},
          folded[segment]);
    }
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(zerox, CPU, m) { m.impl("adam_", &adam_); }

}  // namespace zx
