// The ops on CUDA tensors: they check the tensors, and launch kernels on the current stream. Nothing here waits for the
// device.
//
// This file includes no header of CUDA, and uses streams through c10's device-generic interface. So it compiles and
// links under a torch without CUDA, too.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "cuda/kernels.h"
#include "math/exact_sum.h"
#include "op_arguments.h"
#include "torch_internals.h"

namespace zx {
namespace {

void check_launch(int error, const char* op) {
  TORCH_CHECK(error == 0, "zerox::", op, ": CUDA error ", error, ": ", cuda::error_text(error));
}

// Makes the device of a tensor current, and has its current stream.
class OnDevice {
 public:
  explicit OnDevice(const at::Tensor& tensor)
      : guard_(tensor.device()), stream_(internals::current_stream(tensor.device())) {}
  cuda::Stream stream() const {
    return {static_cast<CUstream_st*>(stream_.native_handle()), static_cast<int>(stream_.device_index())};
  }

 private:
  c10::DeviceGuard guard_;
  c10::Stream stream_;
};

// A replay of the graph would take what it is given from where it lay during the capture.
void refuse_capture(const OnDevice& on) {
  TORCH_CHECK(!cuda::is_capturing(on.stream()),
              "zerox: only step() can be captured into a CUDA graph; backward and what is reduced gradients can't");
}

// A table written on the host for one launch. It is copied from pinned memory, which the allocator keeps until the copy
// is done.
template <class Row>
class Upload {
 public:
  Upload(const std::vector<Row>& rows, const at::Tensor& beside) {
    refuse_capture(OnDevice(beside));
    const auto bytes = static_cast<int64_t>(rows.size() * sizeof(Row));
    const at::Tensor host = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    if (bytes > 0) std::memcpy(host.mutable_data_ptr(), rows.data(), static_cast<size_t>(bytes));
    device_ = host.to(beside.device(), /*non_blocking=*/true);
  }
  const Row* rows() const { return static_cast<const Row*>(device_.const_data_ptr()); }

 private:
  at::Tensor device_;
};

const Segment* segment_rows(const at::Tensor& segments) {
  return reinterpret_cast<const Segment*>(segments.const_data_ptr<int64_t>());
}

Upload<const void*> upload_starts(at::TensorList slices, const at::Tensor& beside) {
  std::vector<const void*> starts;
  for (const at::Tensor& slice : slices) starts.push_back(slice.const_data_ptr());
  return {starts, beside};
}

void flatten_(at::Tensor& flat, at::TensorList sources, const at::Tensor& pieces, const at::Tensor& flags) {
  constexpr const char* op = "flatten_";
  check_flatten(flat, sources, pieces, flags);
  const OnDevice on(flat);
  refuse_capture(on);
  const auto* rows = reinterpret_cast<const Piece*>(pieces.const_data_ptr<int64_t>());
  std::vector<cuda::FlatPiece> flat_pieces;
  for (int64_t i = 0; i < pieces.size(0); ++i) {
    const Piece& row = rows[i];
    if (row.numel == 0) continue;
    const at::Tensor& source = sources[row.source];
    flat_pieces.push_back({bytes_at(source, row.source_start), row.flat_start, row.flat_start + row.numel,
                           dtype_of(source, op, "sources")});
  }
  const auto* raised = flags.const_data_ptr<int64_t>();
  std::vector<int64_t> ascending(raised, raised + flags.numel());
  std::sort(ascending.begin(), ascending.end());
  cuda::FlatBuffer buffer{dtype_of(flat, op, "flat"),
                          flat.mutable_data_ptr(),
                          flat.numel(),
                          flat_pieces.data(),
                          static_cast<int64_t>(flat_pieces.size()),
                          ascending.data(),
                          flags.numel(),
                          /*on_host=*/true};
  if (buffer.num_pieces <= cuda::kFewPieces && buffer.num_flags <= cuda::kFewFlags) {
    return check_launch(cuda::flatten(buffer, on.stream()), op);
  }
  const Upload<cuda::FlatPiece> device_pieces(flat_pieces, flat);
  const Upload<int64_t> device_flags(ascending, flat);
  buffer.pieces = device_pieces.rows();
  buffer.flags = device_flags.rows();
  buffer.on_host = false;
  check_launch(cuda::flatten(buffer, on.stream()), op);
}

void read_flags_(at::Tensor& present, at::Tensor& replaced, at::TensorList slices, int64_t shard_numel) {
  constexpr const char* op = "read_flags_";
  check_read_flags(present, replaced, slices, shard_numel);
  const OnDevice on(present);
  const auto starts = upload_starts(slices, present);
  const DType dtype = slices.empty() ? DType::f32 : dtype_of(slices.front(), op, "slices");
  check_launch(
      cuda::read_flags({dtype, starts.rows(), static_cast<int64_t>(slices.size())}, shard_numel,
                       {present.mutable_data_ptr<uint8_t>(), replaced.mutable_data_ptr<uint8_t>(), present.numel()},
                       on.stream()),
      op);
}

void reduce_(at::Tensor& shard, at::Tensor& limbs, at::TensorList slices, const at::Tensor& segments,
             const at::Tensor& replaced, double divisor, bool accumulate) {
  constexpr const char* op = "reduce_";
  check_reduce(shard, limbs, slices, segments, replaced, divisor);
  const OnDevice on(shard);
  const auto starts = upload_starts(slices, shard);
  const DType dtype = dtype_of(shard, op, "shard");
  check_launch(cuda::reduce({dtype, starts.rows(), static_cast<int64_t>(slices.size())}, divisor,
                            {shard.mutable_data_ptr(), shard.numel(), segment_rows(segments), segments.size(0),
                             replaced.const_data_ptr<uint8_t>(), accumulate, limbs.mutable_data_ptr<int64_t>()},
                            on.stream()),
               op);
}

void norm_(at::Tensor& limbs, const at::Tensor& shard, const at::Tensor& segments, double p,
           const std::optional<at::Tensor>& mask) {
  constexpr const char* op = "norm_";
  const bool by_segment = check_norm(limbs, shard, segments, p);
  const KeptBits kept = check_mask(mask, shard, op);
  const OnDevice on(shard);
  const int64_t sums = by_segment ? segments.size(0) : 1;
  for (int64_t i = 0; i < sums; ++i) {
    check_launch(
        cuda::norm({dtype_of(shard, op, "shard"), shard.const_data_ptr(), shard.numel(), segment_rows(segments) + i,
                    by_segment ? 1 : segments.size(0), p, limbs.mutable_data_ptr<int64_t>() + i * kExactLimbs, kept},
                   on.stream()),
        op);
  }
}

at::Tensor norm_value(const at::Tensor& limbs, double p) {
  const int64_t count = check_norm_value(limbs, p);
  const OnDevice on(limbs);
  at::Tensor result = at::empty({count, 2}, limbs.options().dtype(at::kDouble));
  check_launch(
      cuda::norm_value(limbs.const_data_ptr<int64_t>(), count, p, result.mutable_data_ptr<double>(), on.stream()),
      "norm_value");
  return limbs.dim() == 2 ? result : result.reshape({2});
}

// Collects shards of the same types, and updates them.
class UpdateLaunch {
 public:
  void add(const ShardTensors& t, const ShardTables& tables) {
    const auto [master_kind, states, kept] = check_update(t, tables);
    const cuda::UpdateElements elements{tables.rule.kind,
                                        dtype_of(t.param, kOp, "param"),
                                        master_kind,
                                        dtype_of(t.grad, kOp, "grad"),
                                        t.param.mutable_data_ptr(),
                                        t.master == nullptr ? nullptr : t.master->mutable_data_ptr(),
                                        t.grad.const_data_ptr(),
                                        states,
                                        t.param.numel(),
                                        kept};
    if (!shards_.empty()) check_like_first(elements);
    const auto& scale = tables.grad_scale;
    shards_.push_back(
        {elements,
         {segment_rows(tables.segments), tables.segments.size(0), tables.present.const_data_ptr<uint8_t>(),
          tables.steps.mutable_data_ptr<int64_t>(), tables.options.const_data_ptr<double>(),
          scale ? scale->const_data_ptr<double>() : nullptr, nullptr}});
    num_segments_ += tables.segments.size(0);
  }

  void run(const at::Tensor& beside) {
    const OnDevice on(beside);
    const at::Tensor folded = at::empty({num_segments_ * cuda::kFoldedBytes}, beside.options().dtype(at::kByte));
    auto* free = folded.mutable_data_ptr<uint8_t>();
    for (auto& [elements, segments] : shards_) {
      segments.folded = free;
      free += segments.count * cuda::kFoldedBytes;
    }
    check_launch(cuda::update({shards_.data(), static_cast<int64_t>(shards_.size())}, on.stream()), kOp);
  }

 private:
  void check_like_first(const cuda::UpdateElements& e) const {
    const cuda::UpdateElements& first = shards_.front().elements;
    ZX_CHECK(e.param_dtype == first.param_dtype && e.master_kind == first.master_kind &&
                 e.grad_dtype == first.grad_dtype && e.states.kind == first.states.kind,
             kOp, "param", "and all that belongs to it must have the same dtypes in every shard");
  }

  static constexpr const char* kOp = "update_";
  std::vector<cuda::UpdateShard> shards_;
  int64_t num_segments_ = 0;
};

void update_(c10::string_view rule, at::TensorList param, at::TensorList master, at::TensorList grad,
             at::TensorList state, at::TensorList scales, at::TensorList segments, at::TensorList present,
             at::TensorList steps, const at::Tensor& options, const std::optional<at::Tensor>& grad_scale,
             at::TensorList masks) {
  UpdateLaunch launch;
  for_each_shard({rule, param, master, grad, state, scales, segments, present, steps, options, grad_scale, masks},
                 [&](const ShardTensors& tensors, const ShardTables& tables) { launch.add(tensors, tables); });
  if (!param.empty()) launch.run(param.front());
}

void update_rows_(c10::string_view rule, at::Tensor& values, const std::optional<at::Tensor>& master,
                  const at::Tensor& grads, at::TensorList states, at::Tensor& step, const at::Tensor& rows,
                  const at::Tensor& places, at::ArrayRef<double> options, double scale, double limit) {
  constexpr const char* op = "update_rows_";
  const RuleFacts& facts = rule_named(rule, op);
  const TouchedRows touched = check_update_rows(facts, {values, master, grads, states, step, rows, places}, options);
  auto* const count = step.mutable_data_ptr<int64_t>();
  with_rule(facts.kind, [&](auto type) {
    typename decltype(type)::type::Options row;
    std::memcpy(&row, options.data(), sizeof(row));
    if (decltype(type)::type::counts_step(row)) ++*count;
  });
  const cuda::RowUpdate update{facts.kind, options.data(), *count, scale, limit, touched};
  check_launch(cuda::update_rows(update, OnDevice(values).stream()), op);
}

}  // namespace

// Tests build this file for a device of their own.
#if !defined(ZX_OPS_KEY)
#define ZX_OPS_KEY CUDA
#endif
TORCH_LIBRARY_IMPL(zerox, ZX_OPS_KEY, m) {
  m.impl("flatten_", &flatten_);
  m.impl("read_flags_", &read_flags_);
  m.impl("reduce_", &reduce_);
  m.impl("norm_", &norm_);
  m.impl("norm_value", &norm_value);
  m.impl("update_", &update_);
  m.impl("update_rows_", &update_rows_);
}

}  // namespace zx
