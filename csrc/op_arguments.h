// Checks at the door of the ops, the same on every device. What lies in a table is checked only where reading it needs
// no synchronisation: on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "check.h"
#include "math/dtype.h"
#include "math/rules.h"
#include "math/segment.h"
#include "math/state.h"

namespace zx {

DType dtype_of(const at::Tensor& tensor, const char* op, const char* argument);

inline char* bytes_at(const at::Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.data_ptr()) + element * static_cast<int64_t>(tensor.element_size());
}

// An array that an op reaches through a bare pointer: flags, counts, words. On the device of `beside`.
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
void check_reduce(const at::Tensor& shard, const at::Tensor& words, at::TensorList slices, const at::Tensor& segments,
                  const at::Tensor& replaced, int64_t world);
void check_norm(const at::Tensor& words, const at::Tensor& shard, const at::Tensor& segments, double p);
void check_norm_value(const at::Tensor& words, double p);

// One shard of update_.
struct ShardTensors {
  const at::Tensor& param;
  const at::Tensor* master;  // null where none is kept
  const at::Tensor& grad;
  at::TensorList state;
  at::TensorList scales;  // one for each of `state`; none but for 8-bit state
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
};
ShardStorage check_update(const ShardTensors& tensors, const ShardTables& tables);

// The arguments of update_: of every list one tensor a shard, but no master where none is kept, and of `state` and
// `scales` as many a shard as the rule keeps, shard by shard.
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
};
using ShardCall = std::function<void(const ShardTensors&, const ShardTables&)>;
void for_each_shard(const ShardLists& lists, const ShardCall& call);

}  // namespace zx
