// What the functions of RowTables share: checks of arguments, and lengths of messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

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

inline void check_values(const at::Tensor& values, int64_t count, int64_t width, const char* argument) {
  ZX_CHECK_DTYPE(values, at::kFloat, "RowTables", argument);
  ZX_CHECK(values.dim() == 2 && values.size(0) == count && values.size(1) == width, "RowTables", argument, "must be [",
           count, ", ", width, "], got ", values.sizes());
  ZX_CHECK_CONTIGUOUS(values, "RowTables", argument);
}

// Of a message about one table: `count` rows of those that one rank owns.
inline int64_t message_words(int64_t count, int64_t owned, int64_t width) {
  return name_words(count, owned) + count * width;
}

// Rows lie anywhere in a table: each would cost a miss of the cache, one after the other.
constexpr int64_t kAhead = 8;
constexpr int64_t kFloatsALine = 16;
inline void prefetch_row(const float* row, int64_t width) {
  for (int64_t k = 0; k < width; k += kFloatsALine) __builtin_prefetch(row + k, 1);
}

}  // namespace zx
