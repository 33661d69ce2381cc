#include "op_arguments.h"

#include <cstring>

#include "math/exact_sum.h"

namespace zx {
namespace {

void check_device(const at::Tensor& tensor, const at::Tensor& beside, const char* op, const char* argument) {
  ZX_CHECK(tensor.device() == beside.device(), op, argument, "must be on ", beside.device(), ", got ", tensor.device());
}

void check_slices(at::TensorList slices, int64_t least_numel, const at::Tensor& beside, const char* op) {
  for (const at::Tensor& slice : slices) {
    ZX_CHECK(slice.numel() >= least_numel, op, "slices", "must have ", least_numel, " elements, got ", slice.numel());
    ZX_CHECK_CONTIGUOUS(slice, op, "slices");
    check_device(slice, beside, op, "slices");
  }
}

Master master_kind(const at::Tensor& param, const at::Tensor& master, const char* op) {
  const bool half = param.scalar_type() == at::kHalf || param.scalar_type() == at::kBFloat16;
  if (half && master.scalar_type() == at::kFloat) return Master::fp32;
  ZX_CHECK(param.scalar_type() == at::kBFloat16 && master.scalar_type() == at::kShort, op, "master",
           "must be float32 beside a 16-bit parameter or int16 beside bfloat16, got ", master.scalar_type(), " beside ",
           param.scalar_type());
  return Master::remainder;
}

Master check_master(const at::Tensor& param, const at::Tensor* master) {
  constexpr const char* op = "update_";
  if (master == nullptr) return Master::none;
  ZX_CHECK_NUMEL(*master, param.numel(), op, "master");
  ZX_CHECK_CONTIGUOUS(*master, op, "master");
  check_device(*master, param, op, "master");
  return master_kind(param, *master, op);
}

StoredStates check_state(const ShardTensors& t, const RuleFacts& rule) {
  constexpr const char* op = "update_";
  const size_t num_states = t.state.size();
  ZX_CHECK(num_states >= rule.least_states && num_states <= rule.most_states, op, "state", "must be ",
           rule.least_states, " to ", rule.most_states, " tensors a shard for ", rule.name, ", got ", num_states);
  const auto wide = t.param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto dtype = num_states > 0 ? t.state[0].scalar_type() : wide;
  StateKind kind = StateKind::wide;
  if (t.param.scalar_type() == at::kDouble) {
    ZX_CHECK(dtype == at::kDouble, op, "state", "must be Double beside a Double parameter, got ", dtype);
  } else {
    kind = state_kind_of(dtype, op, "state");
  }
  const int64_t numel = t.param.numel();
  for (const at::Tensor& values : t.state) check_array(values, dtype, numel, t.param, op, "state");

  const size_t num_scales = kind == StateKind::blockwise ? num_states : 0;
  ZX_CHECK(t.scales.size() == num_scales, op, "scales", "must be ", num_scales, " tensors beside ", num_states, " of ",
           dtype, ", got ", t.scales.size());
  for (const at::Tensor& scale : t.scales)
    check_array(scale, at::kFloat, num_state_blocks(numel), t.param, op, "scales");
  StoredStates states{kind, {}};
  for (size_t i = 0; i < num_states; ++i) {
    states.at[i] = {t.state[i].data_ptr(), num_scales > 0 ? t.scales[i].mutable_data_ptr<float>() : nullptr};
  }
  return states;
}

}  // namespace

const RuleFacts& rule_named(c10::string_view name, const char* op) {
  std::string known;
  for (const RuleFacts& rule : kRules) {
    if (name == rule.name) return rule;
    known += (known.empty() ? "" : ", ") + std::string(rule.name);
  }
  ZX_CHECK(false, op, "rule", "must be ", known, ", got ", name);
}

StateKind state_kind_of(at::ScalarType dtype, const char* op, const char* argument) {
  ZX_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kByte, op, argument,
           "must be Float, BFloat16 or Byte, got ", dtype);
  return dtype == at::kFloat ? StateKind::wide : dtype == at::kByte ? StateKind::blockwise : StateKind::bf16;
}

DType dtype_of(const at::Tensor& tensor, const char* op, const char* argument) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return DType::f64;
    case at::kFloat:
      return DType::f32;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    default:
      ZX_CHECK(false, op, argument, "must be float64, float32, bfloat16 or float16, got ", tensor.scalar_type());
  }
}

void check_array(const at::Tensor& tensor, at::ScalarType dtype, int64_t numel, const at::Tensor& beside,
                 const char* op, const char* argument) {
  ZX_CHECK_DTYPE(tensor, dtype, op, argument);
  ZX_CHECK_NUMEL(tensor, numel, op, argument);
  ZX_CHECK_CONTIGUOUS(tensor, op, argument);
  check_device(tensor, beside, op, argument);
}

void check_segments(const at::Tensor& table, const at::Tensor& beside, const char* op) {
  ZX_CHECK_DTYPE(table, at::kLong, op, "segments");
  ZX_CHECK_CONTIGUOUS(table, op, "segments");
  ZX_CHECK(table.dim() == 2 && table.size(1) == kSegmentColumns, op, "segments", "must be [n, ", kSegmentColumns,
           "], got ", table.sizes());
  check_device(table, beside, op, "segments");
}

void check_flatten(const at::Tensor& flat, at::TensorList sources, const at::Tensor& pieces, const at::Tensor& flags) {
  constexpr const char* op = "flatten_";
  dtype_of(flat, op, "flat");
  ZX_CHECK_CONTIGUOUS(flat, op, "flat");
  ZX_CHECK(pieces.is_cpu(), op, "pieces", "must be on the CPU, got ", pieces.device());
  ZX_CHECK(flags.is_cpu(), op, "flags", "must be on the CPU, got ", flags.device());
  ZX_CHECK_DTYPE(pieces, at::kLong, op, "pieces");
  ZX_CHECK(pieces.dim() == 2 && pieces.size(1) == kPieceColumns && pieces.is_contiguous(), op, "pieces",
           "must be [n, 4], got ", pieces.sizes());
  ZX_CHECK_DTYPE(flags, at::kLong, op, "flags");
  ZX_CHECK_CONTIGUOUS(flags, op, "flags");
  const auto* raised = flags.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < flags.numel(); ++i) {
    ZX_CHECK(raised[i] >= 0 && raised[i] < flat.numel(), op, "flags", "must lie in [0, ", flat.numel(), "), got ",
             raised[i]);
  }
  for (const at::Tensor& source : sources) {
    ZX_CHECK(source.is_non_overlapping_and_dense(), op, "sources", "must be dense, got strides ", source.strides());
    dtype_of(source, op, "sources");
    check_device(source, flat, op, "sources");
  }
  const auto* rows = reinterpret_cast<const Piece*>(pieces.const_data_ptr<int64_t>());
  for (int64_t i = 0, end = 0; i < pieces.size(0); ++i) {
    const Piece& row = rows[i];
    ZX_CHECK(row.source >= 0 && row.source < static_cast<int64_t>(sources.size()) && row.source_start >= 0 &&
                 row.numel >= 0 && row.source_start + row.numel <= sources[row.source].numel() &&
                 row.flat_start >= end && row.flat_start + row.numel <= flat.numel(),
             op, "pieces", "row ", i, " (", row.source, ", ", row.source_start, ", ", row.flat_start, ", ", row.numel,
             ") leaves its source or overlaps what lies before ", end, " of ", flat.numel());
    end = row.flat_start + row.numel;
  }
}

void check_read_flags(const at::Tensor& present, const at::Tensor& replaced, at::TensorList slices,
                      int64_t shard_numel) {
  constexpr const char* op = "read_flags_";
  check_array(present, at::kByte, present.numel(), present, op, "present");
  check_array(replaced, at::kByte, present.numel(), present, op, "replaced");
  ZX_CHECK(shard_numel >= 0, op, "shard_numel", "must not be negative, got ", shard_numel);
  for (const at::Tensor& slice : slices) {
    dtype_of(slice, op, "slices");
    ZX_CHECK_DTYPE(slice, slices.front().scalar_type(), op, "slices");
  }
  check_slices(slices, shard_numel + 2 * present.numel(), present, op);
}

void check_reduce(const at::Tensor& shard, const at::Tensor& limbs, at::TensorList slices, const at::Tensor& segments,
                  const at::Tensor& replaced, double divisor) {
  constexpr const char* op = "reduce_";
  dtype_of(shard, op, "shard");
  ZX_CHECK_CONTIGUOUS(shard, op, "shard");
  check_array(limbs, at::kLong, kExactLimbs, shard, op, "limbs");
  ZX_CHECK(!slices.empty(), op, "slices", "must not be empty");
  for (const at::Tensor& slice : slices) ZX_CHECK_DTYPE(slice, shard.scalar_type(), op, "slices");
  check_slices(slices, shard.numel(), shard, op);
  ZX_CHECK(divisor > 0.0, op, "divisor", "must be positive, got ", divisor);
  check_segments(segments, shard, op);
  check_array(replaced, at::kByte, segments.size(0), shard, op, "replaced");
}

bool check_norm(const at::Tensor& limbs, const at::Tensor& shard, const at::Tensor& segments, double p) {
  constexpr const char* op = "norm_";
  dtype_of(shard, op, "shard");
  ZX_CHECK_CONTIGUOUS(shard, op, "shard");
  check_segments(segments, shard, op);
  const bool by_segment = limbs.dim() == 2;
  check_array(limbs, at::kLong, by_segment ? segments.size(0) * kExactLimbs : kExactLimbs, shard, op, "limbs");
  ZX_CHECK(p > 0.0, op, "p", "must be positive, got ", p);
  return by_segment;
}

int64_t check_norm_value(const at::Tensor& limbs, double p) {
  const int64_t count = limbs.dim() == 2 ? limbs.size(0) : 1;
  check_array(limbs, at::kLong, count * kExactLimbs, limbs, "norm_value", "limbs");
  ZX_CHECK(p > 0.0, "norm_value", "p", "must be positive, got ", p);
  return count;
}

TouchedRows check_update_rows(const RuleFacts& rule, const RowTensors& t, at::ArrayRef<double> options) {
  constexpr const char* op = "update_rows_";
  ZX_CHECK(static_cast<int64_t>(options.size()) == rule.option_columns, op, "options", "must be ", rule.option_columns,
           " for ", rule.name, ", got ", options.size());
  ZX_CHECK(t.values.dim() == 2, op, "values", "must have 2 dimensions, got ", t.values.dim());
  const DType dtype = dtype_of(t.values, op, "values");
  ZX_CHECK(dtype != DType::f64, op, "values", "must not be float64");
  ZX_CHECK_CONTIGUOUS(t.values, op, "values");
  const int64_t width = t.values.size(1);
  const int64_t count = t.rows.numel();
  check_array(t.rows, at::kLong, count, t.values, op, "rows");
  check_array(t.places, at::kLong, count, t.values, op, "places");
  check_array(t.grads, at::kFloat, count * width, t.values, op, "grads");
  ZX_CHECK(t.step.device().is_cpu(), op, "step", "must be on cpu, got ", t.step.device());
  check_array(t.step, at::kLong, 1, t.step, op, "step");
  const auto needed = static_cast<size_t>(with_rule(rule.kind, [&](auto type) {
    typename decltype(type)::type::Options row;
    std::memcpy(&row, options.data(), sizeof(row));
    return decltype(type)::type::num_states(row);
  }));
  ZX_CHECK(t.states.size() == needed, op, "states", "must be ", needed, " under these options of ", rule.name, ", got ",
           t.states.size());
  TouchedRows touched{count,
                      width,
                      t.rows.const_data_ptr<int64_t>(),
                      t.places.const_data_ptr<int64_t>(),
                      t.grads.const_data_ptr<float>(),
                      dtype,
                      t.values.mutable_data_ptr(),
                      Master::none,
                      nullptr};
  const auto check_kept = [&](const at::Tensor& kept, const char* argument) {
    ZX_CHECK(kept.dim() == 2 && kept.size(1) == width, op, argument, "must have rows of ", width, ", got shape ",
             kept.sizes());
    ZX_CHECK_CONTIGUOUS(kept, op, argument);
    check_device(kept, t.values, op, argument);
  };
  for (size_t s = 0; s < needed; ++s) {
    check_kept(t.states[s], "states");
    ZX_CHECK_DTYPE(t.states[s], at::kFloat, op, "states");
    touched.states[s] = t.states[s].mutable_data_ptr<float>();
  }
  if (t.master) {
    check_kept(*t.master, "master");
    touched.master_kind = master_kind(t.values, *t.master, op);
    touched.master = t.master->mutable_data_ptr();
  }
  return touched;
}

KeptBits check_mask(const std::optional<at::Tensor>& mask, const at::Tensor& shard, const char* op) {
  if (!mask || mask->numel() == 0) return {};
  check_array(*mask, at::kByte, (shard.numel() + 7) / 8 + kMaskPadding, shard, op, "mask");
  return {mask->const_data_ptr<uint8_t>(), 0};
}

ShardStorage check_update(const ShardTensors& t, const ShardTables& tables) {
  constexpr const char* op = "update_";
  const at::Tensor& param = t.param;
  const DType param_dtype = dtype_of(param, op, "param");
  ZX_CHECK(dtype_of(t.grad, op, "grad") != DType::f64 || param_dtype == DType::f64, op, "grad",
           "must not be float64 beside ", param.scalar_type());
  ZX_CHECK_CONTIGUOUS(param, op, "param");
  ZX_CHECK_CONTIGUOUS(t.grad, op, "grad");
  ZX_CHECK_NUMEL(t.grad, param.numel(), op, "grad");
  check_device(t.grad, param, op, "grad");
  const ShardStorage storage{check_master(param, t.master), check_state(t, tables.rule), check_mask(t.mask, param, op)};
  check_segments(tables.segments, param, op);
  const int64_t count = tables.segments.size(0);
  check_array(tables.present, at::kByte, count, param, op, "present");
  check_array(tables.steps, at::kLong, count, param, op, "steps");
  const at::Tensor& options = tables.options;
  ZX_CHECK_DTYPE(options, at::kDouble, op, "options");
  ZX_CHECK(options.dim() == 2 && options.size(1) == tables.rule.option_columns && options.is_contiguous(), op,
           "options", "must be [groups, ", tables.rule.option_columns, "], got ", options.sizes());
  check_device(options, param, op, "options");
  if (tables.grad_scale) check_array(*tables.grad_scale, at::kDouble, 1, param, op, "grad_scale");
  return storage;
}

void for_each_shard(const ShardLists& l, const ShardCall& call) {
  constexpr const char* op = "update_";
  const RuleFacts& rule = rule_named(l.rule, "update_");
  const size_t count = l.param.size();
  const auto check_count = [&](at::TensorList list, const char* argument, bool may_be_none = false) {
    ZX_CHECK(list.size() == count || (may_be_none && list.empty()), op, argument, "must be ", count, " tensors, got ",
             list.size());
  };
  const auto number_in_each = [&](at::TensorList list, const char* argument) {
    ZX_CHECK(count == 0 || list.size() % count == 0, op, argument, "must be as many for each of ", count,
             " shards, got ", list.size());
    return count == 0 ? 0 : list.size() / count;
  };
  check_count(l.master, "master", /*may_be_none=*/true);
  check_count(l.masks, "masks", /*may_be_none=*/true);
  check_count(l.grad, "grad");
  check_count(l.segments, "segments");
  check_count(l.present, "present");
  check_count(l.steps, "steps");
  const size_t num_state = number_in_each(l.state, "state");
  const size_t num_scales = number_in_each(l.scales, "scales");
  for (size_t i = 0; i < count; ++i) {
    call({l.param[i], l.master.empty() ? nullptr : &l.master[i], l.grad[i], l.state.slice(i * num_state, num_state),
          l.scales.slice(i * num_scales, num_scales), l.masks.empty() ? std::nullopt : std::optional(l.masks[i])},
         {rule, l.segments[i], l.present[i], l.steps[i], l.options, l.grad_scale});
  }
}

}  // namespace zx
