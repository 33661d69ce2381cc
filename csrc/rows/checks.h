// What the functions of RowTables share: checks of arguments, and lengths of messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "math/dtype.h"
#include "op_arguments.h"
#include "rows/row_owners.h"

namespace zx {

inline void check_length(size_t found, size_t expected, const char* argument) {
  TORCH_CHECK_VALUE(found == expected, "zerox: `", argument, "` must have ", expected,
                    " elements, one for each table, ", "got ", found);
}

inline void check_rows(const at::Tensor& rows, const char* argument) {
  ZX_CHECK(rows.scalar_type() == at::kLong && rows.dim() == 1 && rows.is_contiguous(), "RowTables", argument,
           "must be int64, with one dimension, contiguous, got ", rows.scalar_type(), ", shape ", rows.sizes());
}

inline void check_shape(const at::Tensor& values, int64_t count, int64_t width, const char* argument) {
  ZX_CHECK(values.dim() == 2 && values.size(0) == count && values.size(1) == width, "RowTables", argument, "must be [",
           count, ", ", width, "], got ", values.sizes());
  ZX_CHECK_CONTIGUOUS(values, "RowTables", argument);
}

inline void check_values(const at::Tensor& values, int64_t count, int64_t width, const char* argument) {
  ZX_CHECK_DTYPE(values, at::kFloat, "RowTables", argument);
  check_shape(values, count, width, argument);
}

// Of a message about one table: `count` rows of those that one rank owns, of `width` values each. Gradients are sent in
// float, whatever the table's dtype: a rank's sum of several rows has no 16-bit value. Updated rows are sent as they
// are in the table.
inline int64_t message_words(int64_t count, int64_t owned, int64_t width, DType dtype = DType::f32) {
  return name_words(count, owned) + (count * width * width_of(dtype) + 3) / 4;
}

// Rows lie anywhere in a table: each would cost a miss of the cache, one after the other.
constexpr int64_t kAhead = 8;
constexpr int64_t kBytesALine = 64;
inline void prefetch_row(const void* row, int64_t bytes) {
  for (int64_t k = 0; k < bytes; k += kBytesALine) __builtin_prefetch(static_cast<const char*>(row) + k, 1);
}

}  // namespace zx
