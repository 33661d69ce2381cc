// The CUDA kernels as functions on raw device pointers, for the ops in this folder and for tests that run the same
// sources on the host. This file includes no header of torch or CUDA, so that neither's version matters to the other.
//
// Each call launches on `stream`, never waits, and returns a cudaError_t (0: success). Tables lie on the device,
// but for those that become part of the launch, and must stay there until the stream has passed the call.
#pragma once

#include <cstdint>

#include "math/dtype.h"
#include "math/kept_bits.h"
#include "math/norm.h"
#include "math/rules.h"
#include "math/segment.h"
#include "math/state.h"
#include "math/touched_rows.h"

struct CUstream_st;

namespace zx::cuda {

// A cudaStream_t and its device. This library has a CUDA runtime of its own, which does not know what torch's runtime
// was told of the current device.
struct Stream {
  CUstream_st* handle;
  int device;
};

const char* error_text(int error);

// Whether work on the stream becomes part of a CUDA graph instead of being run.
bool is_capturing(Stream stream);

// ---- flatten_
struct FlatPiece {  // elements [start, stop) of the flat buffer; the one at `start` comes from `source`
  const void* source;
  int64_t start;
  int64_t stop;
  DType dtype;
};
// So many pieces and flags, and no more, may also lie on the host: they become part of the launch.
constexpr int64_t kFewPieces = 64;
constexpr int64_t kFewFlags = 160;
struct FlatBuffer {
  DType dtype;
  void* flat;
  int64_t numel;
  const FlatPiece* pieces;  // by start, disjoint
  int64_t num_pieces;
  const int64_t* flags;  // ascending: elements outside all pieces that become 1; other such elements become 0
  int64_t num_flags;
  bool on_host;  // both tables
};
int flatten(const FlatBuffer& buffer, Stream stream);

// ---- read_flags_ and reduce_
struct Slices {
  DType dtype;
  const void* const* starts;  // one pointer per slice
  int64_t count;
};
struct SegmentFlags {
  uint8_t* present;
  uint8_t* replaced;
  int64_t num_segments;
};
int read_flags(const Slices& slices, int64_t shard_numel, const SegmentFlags& flags, Stream stream);

struct ReducedShard {
  void* shard;
  int64_t numel;
  const Segment* segments;
  int64_t num_segments;
  const uint8_t* replaced;
  bool accumulate;
  int64_t* limbs;
};
int reduce(const Slices& slices, double divisor, const ReducedShard& shard, Stream stream);

// ---- norm_ and norm_value
struct NormShard {
  DType dtype;
  const void* values;
  int64_t numel;
  const Segment* segments;
  int64_t num_segments;
  double order;
  int64_t* limbs;
  KeptBits kept;
};
int norm(const NormShard& shard, Stream stream);
// Brings every digit of an exact sum under 2^32, which leaves room for the sum over buckets and ranks.
int carry(int64_t* limbs, Stream stream);
// Of `count` exact sums, one after the other.
int norm_value(const int64_t* limbs, int64_t count, double order, double* value_and_finite, Stream stream);

// ---- update_
struct UpdateElements {
  RuleKind rule;
  DType param_dtype;
  Master master_kind;
  DType grad_dtype;
  void* param;
  void* master;
  const void* grad;
  StoredStates states;
  int64_t numel;
  KeptBits kept;
};
struct UpdateSegments {
  const Segment* segments;
  int64_t count;
  const uint8_t* present;
  int64_t* steps;
  const double* options;     // a row of the rule's Options for each param group
  const double* grad_scale;  // null means 1
  void* folded;              // scratch of count * kFoldedBytes
};
constexpr int64_t kFoldedBytes = 112;
struct UpdateShard {
  UpdateElements elements;
  UpdateSegments segments;
};
// Shards of the same rule and types. There is one launch, or one for each kMostTogether shards.
struct UpdateShards {
  const UpdateShard* shards;
  int64_t count;

  const UpdateElements& elements() const { return shards[0].elements; }
  const UpdateShard* begin() const { return shards; }
  const UpdateShard* end() const { return shards + count; }
};
constexpr int kMostTogether = 24;
int update(const UpdateShards& shards, Stream stream);
inline int update(const UpdateElements& elements, const UpdateSegments& segments, Stream stream) {
  const UpdateShard shard{elements, segments};
  return update({&shard, 1}, stream);
}
// The parts of update(), by how states are stored, each in a file of its own. They take kMostTogether shards at most.
int update_bf16(const UpdateShards& shards, Stream stream);
int update_blockwise(const UpdateShards& shards, Stream stream);

// ---- update_rows_
struct RowUpdate {
  RuleKind rule;
  const double* options;  // of a param group, on the host: the rule's Options
  int64_t num_updates;    // this one counted
  double scale;           // gradients are multiplied by it, and then cut at `limit`
  double limit;           // infinite if there is none
  TouchedRows touched;
};
int update_rows(const RowUpdate& update, Stream stream);

}  // namespace zx::cuda
