// Checks at the door of the ops, the same on every device. What lies in a table is checked only where reading it needs
// no synchronisation: on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "check.h"
#include "math/dtype.h"
#include "math/moment.h"
#include "math/segment.h"

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

// The tensors of adam_, by name.
struct AdamTensors {
  const at::Tensor& param;
  const std::optional<at::Tensor>& master;
  const at::Tensor& grad;
  const at::Tensor& exp_avg;
  const at::Tensor& exp_avg_sq;
  const std::optional<at::Tensor>& max_exp_avg_sq;
  at::TensorList scales;  // of the moments there are, in this order; none but for 8-bit moments
};
struct AdamTables {
  const at::Tensor& segments;
  const at::Tensor& present;
  const at::Tensor& steps;
  const at::Tensor& options;
  const std::optional<at::Tensor>& grad_scale;
};
struct AdamStorage {
  Master master_kind;
  Moments moments;
};
AdamStorage check_adam(const AdamTensors& tensors, const AdamTables& tables);

// The arguments of adam_together_: of every list one tensor a shard, or none at all where a shard may have none.
struct AdamLists {
  at::TensorList param;
  at::TensorList master;
  at::TensorList grad;
  at::TensorList exp_avg;
  at::TensorList exp_avg_sq;
  at::TensorList max_exp_avg_sq;
  at::TensorList scales;  // of all moments of the first shard, then of the next
  at::TensorList segments;
  at::TensorList present;
  at::TensorList steps;
  const at::Tensor& options;
  const std::optional<at::Tensor>& grad_scale;
};
using AdamCall = std::function<void(const AdamTensors&, const AdamTables&)>;
void for_each_shard(const AdamLists& lists, const AdamCall& call);

}  // namespace zx
