// zerox::update_ on the CPU: one pass from a gradient shard to state, master and parameter.
#include <torch/library.h>

#include "cpu/spans.h"

namespace zx {
namespace {

// A shard's states, from an element on.
StoredStates states_at(const StoredStates& states, int64_t element_bytes, int64_t element) {
  StoredStates from_there = states;
  for (StoredState& state : from_there.at) {
    if (state.values != nullptr) state.values = static_cast<char*>(state.values) + element * element_bytes;
    if (state.scales != nullptr) state.scales += element / kStateBlock;
  }
  return from_there;
}

// Merges adjacent units: small parameters lie one after the other, and a call for each would take longer than
// its elements. Segments with the same `run` are treated alike.
void merge_adjacent(std::vector<WorkUnit>& units, const std::vector<int64_t>& run) {
  size_t count = 0;
  for (const WorkUnit& next : units) {
    WorkUnit* last = count > 0 ? &units[count - 1] : nullptr;
    if (last != nullptr && last->stop == next.start && next.stop - last->start <= kMostInAUnit &&
        run[last->segment] == run[next.segment]) {
      last->stop = next.stop;
    } else {
      units[count++] = next;
    }
  }
  units.resize(count);
}

// A segment whose `present` is 0 is left alone, and so is its step count, as torch leaves a parameter without a
// gradient.
template <class Rule>
void update_shard(const ShardTensors& t, const ShardTables& tables) {
  constexpr const char* op = "update_";
  const auto [master_kind, states, kept] = check_update(t, tables);
  const at::Tensor& param = t.param;
  const at::Tensor& options = tables.options;
  const DType param_dtype = dtype_of(param, op, "param");
  const DType grad_dtype = dtype_of(t.grad, op, "grad");
  const SegmentTable table(tables.segments, param.numel(), op);
  const auto* rows = reinterpret_cast<const typename Rule::Options*>(options.const_data_ptr<double>());
  for (int64_t i = 0; i < table.size(); ++i) {
    const int64_t row = table[i].options_row;
    ZX_CHECK(row >= 0 && row < options.size(0), op, "segments", "row ", i, " names options ", row, " of ",
             options.size(0));
    const auto needed = static_cast<size_t>(Rule::num_states(rows[row]));
    ZX_CHECK(t.state.size() >= needed, op, "state", "must be ", needed, " tensors a shard for options row ", row,
             ", got ", t.state.size());
    ZX_CHECK(states.kind != StateKind::blockwise ||
                 (table[i].start % kStateBlock == 0 && table[i].param_start % kStateBlock == 0),
             op, "segments", "row ", i, " starts at ", table[i].start, " of the shard and ", table[i].param_start,
             " of its parameter: 8-bit states need multiples of ", kStateBlock);
  }

  const double scale = tables.grad_scale ? *tables.grad_scale->const_data_ptr<double>() : 1.0;
  const auto* takes_part = tables.present.const_data_ptr<uint8_t>();
  auto* step_counts = tables.steps.mutable_data_ptr<int64_t>();
  std::vector<typename Rule::template Step<double>> folded(static_cast<size_t>(table.size()));
  std::vector<int64_t> run(folded.size());  // for each segment, the first one that is treated alike
  for (int64_t i = 0; i < table.size(); ++i) {
    run[i] = i;
    if (takes_part[i] == 0) continue;
    const int64_t row = table[i].options_row;
    if (Rule::counts_step(rows[row])) ++step_counts[i];
    // Neighbouring segments mostly share options and count, so the constants are folded once for a run of them.
    const bool same =
        i > 0 && takes_part[i - 1] != 0 && table[i - 1].options_row == row && step_counts[i - 1] == step_counts[i];
    folded[i] = same ? folded[i - 1] : Rule::fold(rows[row], step_counts[i], scale);
    if (same) run[i] = run[i - 1];
  }
  std::vector<WorkUnit> units = split_into_units(table);
  // Random bits and blocks of 8-bit states are counted from each parameter's start, so only those of wide states are
  // merged.
  if (states.kind == StateKind::wide) merge_adjacent(units, run);
  const int64_t state_bytes = t.state.empty() ? 0 : static_cast<int64_t>(t.state[0].element_size());
  parallel_units(units, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const auto [segment, start, stop] = units[i];
      if (takes_part[segment] == 0) continue;
      const Segment& of = table[segment];
      char* master = t.master == nullptr ? nullptr : bytes_at(*t.master, start);
      kernels().update({tables.rule.kind,
                        param_dtype,
                        master_kind,
                        grad_dtype,
                        bytes_at(param, start),
                        master,
                        bytes_at(t.grad, start),
                        Rule::num_states(rows[of.options_row]),
                        states_at(states, state_bytes, start),
                        stop - start,
                        {of.param_start + (start - of.start), random_key(step_counts[segment], of.param)},
                        kept.from(start)},
                       &folded[segment]);
    }
  });
}

void update_(c10::string_view rule, at::TensorList param, at::TensorList master, at::TensorList grad,
             at::TensorList state, at::TensorList scales, at::TensorList segments, at::TensorList present,
             at::TensorList steps, const at::Tensor& options, const std::optional<at::Tensor>& grad_scale,
             at::TensorList masks) {
  for_each_shard({rule, param, master, grad, state, scales, segments, present, steps, options, grad_scale, masks},
                 [](const ShardTensors& tensors, const ShardTables& tables) {
                   with_rule(tables.rule.kind,
                             [&](auto rule) { update_shard<typename decltype(rule)::type>(tensors, tables); });
                 });
}

}  // namespace

TORCH_LIBRARY_IMPL(zerox, CPU, m) { m.impl("update_", &update_); }

}  // namespace zx
