// Checks at the door of the ops, the same on every device. The contents of a table are checked only where reading them
// needs no synchronisation: on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "check.h"
#include "math/dtype.h"
#include "math/kept_bits.h"
#include "math/rules.h"
#include "math/segment.h"
#include "math/state.h"
#include "math/touched_rows.h"

namespace zx {

DType dtype_of(const at::Tensor& tensor, const char* op, const char* argument);
// Of states beside parameters that are updated in float.
StateKind state_kind_of(at::ScalarType dtype, const char* op, const char* argument);
// How many scales so many elements of a parameter have in 8 bits, from its start or a block's on.
constexpr int64_t num_state_blocks(int64_t numel) { return (numel + kStateBlock - 1) / kStateBlock; }
const RuleFacts& rule_named(c10::string_view name, const char* op);

inline char* bytes_at(const at::Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.data_ptr()) + element * static_cast<int64_t>(tensor.element_size());
}

// Checks an array that an op reaches through a bare pointer (flags, counts, limbs). It must be on the device of
// `beside`.
void check_array(const at::Tensor& tensor, at::ScalarType dtype, int64_t numel, const at::Tensor& beside,
                 const char* op, const char* argument);

// int64 [n, 5] on the device of `beside`.
void check_segments(const at::Tensor& table, const at::Tensor& beside, const char* op);

// A row of flatten_'s packing list, which always lies on the CPU.
struct Piece {
  int64_t source;
  int64_t source_start;
  int64_t flat_start;
  int64_t numel;
};
constexpr int64_t kPieceColumns = 4;
void check_flatten(const at::Tensor& flat, at::TensorList sources, const at::Tensor& pieces, const at::Tensor& flags);

void check_read_flags(const at::Tensor& present, const at::Tensor& replaced, at::TensorList slices,
                      int64_t shard_numel);
void check_reduce(const at::Tensor& shard, const at::Tensor& limbs, at::TensorList slices, const at::Tensor& segments,
                  const at::Tensor& replaced, double divisor);
// Returns whether `limbs` are [segments, kExactLimbs], a sum for each segment, and not one sum of all.
bool check_norm(const at::Tensor& limbs, const at::Tensor& shard, const at::Tensor& segments, double p);
// Returns the number of sums: `limbs` are one, or [n, kExactLimbs].
int64_t check_norm_value(const at::Tensor& limbs, double p);

// A mask as uint8 [ceil(n / 8) + kMaskPadding], for a shard of n elements; none, or an empty one, keeps all.
KeptBits check_mask(const std::optional<at::Tensor>& mask, const at::Tensor& shard, const char* op);

// update_rows_: what it is about, for the kernel. Rows and places themselves are not checked.
struct RowTensors {
  const at::Tensor& values;
  const std::optional<at::Tensor>& master;
  const at::Tensor& grads;
  at::TensorList states;
  const at::Tensor& step;
  const at::Tensor& rows;
  const at::Tensor& places;
};
TouchedRows check_update_rows(const RuleFacts& rule, const RowTensors& tensors, at::ArrayRef<double> options);

// One shard of update_.
struct ShardTensors {
  const at::Tensor& param;
  const at::Tensor* master;  // null if none is kept
  const at::Tensor& grad;
  at::TensorList state;
  at::TensorList scales;  // for 8-bit state one for each of `state`, else none
  std::optional<at::Tensor> mask;
};
struct ShardTables {
  const RuleFacts& rule;
  const at::Tensor& segments;
  const at::Tensor& present;
  const at::Tensor& steps;
  const at::Tensor& options;
  const std::optional<at::Tensor>& grad_scale;
};
struct ShardStorage {
  Master master_kind;
  StoredStates states;
  KeptBits kept;
};
ShardStorage check_update(const ShardTensors& tensors, const ShardTables& tables);

// The arguments of update_. Every list has one tensor per shard, with exceptions: `master` is empty if no master is
// kept, and `masks` if there are none; `state` and `scales` have, shard by shard, as many per shard as the rule keeps.
struct ShardLists {
  c10::string_view rule;
  at::TensorList param;
  at::TensorList master;
  at::TensorList grad;
  at::TensorList state;
  at::TensorList scales;
  at::TensorList segments;
  at::TensorList present;
  at::TensorList steps;
  const at::Tensor& options;
  const std::optional<at::Tensor>& grad_scale;
  at::TensorList masks;
};
using ShardCall = std::function<void(const ShardTensors&, const ShardTables&)>;
void for_each_shard(const ShardLists& lists, const ShardCall& call);

}  // namespace zx
