// Gradients that are rows of a table, on the CPU: rows of the same number are added up, dealt to the ranks that own
// them, and updated. See Note [Rows travel by themselves] in zerox/flow/rows.py.
#include <ATen/ops/empty.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "cpu/spans.h"
#include "math/sparse_adam.h"

namespace zx {
namespace {

// Numbers of rows, which travel as int32 where they fit.
class RowNumbers {
 public:
  explicit RowNumbers(const at::Tensor& numbers)
      : wide_(numbers.scalar_type() == at::kLong ? numbers.const_data_ptr<int64_t>() : nullptr),
        narrow_(numbers.scalar_type() == at::kLong ? nullptr : numbers.const_data_ptr<int32_t>()),
        size_(numbers.numel()) {}
  int64_t operator[](int64_t i) const { return wide_ != nullptr ? wide_[i] : narrow_[i]; }
  int64_t size() const { return size_; }

 private:
  const int64_t* wide_;
  const int32_t* narrow_;
  int64_t size_;
};

void check_numbers(const at::Tensor& numbers, const char* op, const char* argument) {
  ZX_CHECK(numbers.scalar_type() == at::kLong || numbers.scalar_type() == at::kInt, op, argument,
           "must be int64 or int32, got ", numbers.scalar_type());
  ZX_CHECK(numbers.dim() == 1, op, argument, "must have one dimension, got ", numbers.sizes());
  ZX_CHECK_CONTIGUOUS(numbers, op, argument);
}

void check_values(const at::Tensor& values, int64_t rows, int64_t width, const char* op, const char* argument) {
  ZX_CHECK_DTYPE(values, at::kFloat, op, argument);
  ZX_CHECK(values.dim() == 2 && values.size(0) == rows && values.size(1) == width, op, argument, "must be [", rows,
           ", ", width, "], got ", values.sizes());
  ZX_CHECK_CONTIGUOUS(values, op, argument);
}

void check_in_table(const RowNumbers& rows, int64_t num_rows, const char* op) {
  for (int64_t i = 0; i < rows.size(); ++i) {
    const int64_t row = rows[i];
    ZX_CHECK(row >= 0 && row < num_rows, op, "rows", "names row ", row, " of ", num_rows);
  }
}

// Which place each row that was seen has. Open addressing: no memory of the table's size, and no allocation a row.
class Places {
 public:
  explicit Places(int64_t most)
      : slots_(std::bit_ceil(static_cast<uint64_t>(2 * most + 2)), Slot{-1, 0}), mask_(slots_.size() - 1) {}

  // The place of `row`: `next` if it was not seen before.
  int64_t of(int64_t row, int64_t next) {
    uint64_t at = (static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15ULL) >> 20;
    for (;; ++at) {
      Slot& slot = slots_[at & mask_];
      if (slot.row == row) return slot.place;
      if (slot.row < 0) {
        slot = {row, next};
        return next;
      }
    }
  }

 private:
  struct Slot {
    int64_t row;
    int64_t place;
  };
  std::vector<Slot> slots_;
  uint64_t mask_;
};

// The rows of all sources once, in the order in which they first come, and the sum of each, added in the given order.
std::tuple<at::Tensor, at::Tensor> sum_rows(at::TensorList rows, at::TensorList values,
                                            const std::optional<at::Tensor>& order, int64_t num_rows, int64_t width) {
  constexpr const char* op = "sum_rows";
  ZX_CHECK(rows.size() == values.size(), op, "values", "must be as many as `rows`, ", rows.size(), ", got ",
           values.size());
  int64_t most = 0;
  for (size_t source = 0; source < rows.size(); ++source) {
    check_numbers(rows[source], op, "rows");
    check_values(values[source], rows[source].numel(), width, op, "values");
    check_in_table(RowNumbers(rows[source]), num_rows, op);
    most += rows[source].numel();
  }
  const int64_t* given = nullptr;
  if (order) {
    ZX_CHECK(rows.size() == 1, op, "order", "is of one source, got ", rows.size());
    check_array(*order, at::kLong, most, rows[0], op, "order");
    given = order->const_data_ptr<int64_t>();
    for (int64_t i = 0; i < most; ++i) {
      ZX_CHECK(given[i] >= 0 && given[i] < most, op, "order", "names element ", given[i], " of ", most);
    }
  }
  at::Tensor found = at::empty({most}, at::kLong);
  at::Tensor sums = at::empty({most, width}, at::kFloat);
  auto* numbers = found.mutable_data_ptr<int64_t>();
  auto* total = sums.mutable_data_ptr<float>();
  Places places(most);
  int64_t count = 0;
  for (size_t source = 0; source < rows.size(); ++source) {
    const RowNumbers named(rows[source]);
    const float* from = values[source].const_data_ptr<float>();
    for (int64_t step = 0; step < named.size(); ++step) {
      const int64_t i = given == nullptr ? step : given[step];
      const int64_t place = places.of(named[i], count);
      const float* __restrict value = from + i * width;
      float* __restrict sum = total + place * width;
      if (place == count) {
        numbers[count++] = named[i];
        std::memcpy(sum, value, static_cast<size_t>(width) * sizeof(float));
      } else {
        for (int64_t k = 0; k < width; ++k) sum[k] += value[k];
      }
    }
  }
  return {found.narrow(0, 0, count), sums.narrow(0, 0, count)};
}

// Rows in the order of their owners, `owners` by block of `block_rows` rows: int32 words, of each owner first the
// numbers of its rows, then their values. And how many rows each owner gets.
std::tuple<at::Tensor, at::Tensor> deal_rows(const at::Tensor& rows, const at::Tensor& values, const at::Tensor& owners,
                                             int64_t block_rows, int64_t num_owners) {
  constexpr const char* op = "deal_rows";
  check_numbers(rows, op, "rows");
  ZX_CHECK(values.dim() == 2, op, "values", "must have two dimensions, got ", values.sizes());
  const int64_t width = values.size(1);
  check_values(values, rows.numel(), width, op, "values");
  ZX_CHECK_DTYPE(owners, at::kInt, op, "owners");
  ZX_CHECK_CONTIGUOUS(owners, op, "owners");
  ZX_CHECK(owners.numel() * block_rows <= std::numeric_limits<int32_t>::max(), op, "owners", "are of too many rows");
  const RowNumbers named(rows);
  check_in_table(named, owners.numel() * block_rows, op);
  const auto* owner_of = owners.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < owners.numel(); ++i) {
    ZX_CHECK(owner_of[i] >= 0 && owner_of[i] < num_owners, op, "owners", "names ", owner_of[i], " of ", num_owners);
  }
  at::Tensor counts = at::zeros({num_owners}, at::kLong);
  auto* count_of = counts.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < named.size(); ++i) ++count_of[owner_of[named[i] / block_rows]];
  at::Tensor packed = at::empty({named.size() * (1 + width)}, at::kInt);
  std::vector<int32_t*> numbers;
  std::vector<int32_t*> bits;
  auto* next = packed.mutable_data_ptr<int32_t>();
  for (int64_t owner = 0; owner < num_owners; ++owner) {
    numbers.push_back(next);
    bits.push_back(next + count_of[owner]);
    next += count_of[owner] * (1 + width);
  }
  const float* from = values.const_data_ptr<float>();
  for (int64_t i = 0; i < named.size(); ++i, from += width) {
    const int32_t owner = owner_of[named[i] / block_rows];
    *numbers[owner]++ = static_cast<int32_t>(named[i]);
    std::memcpy(bits[owner], from, static_cast<size_t>(width) * sizeof(float));
    bits[owner] += width;
  }
  return {packed, counts};
}

// Rows lie anywhere in a table: without this each would cost three misses of the cache, one after the other.
constexpr int64_t kAhead = 8;
constexpr int64_t kFloatsALine = 16;
void prefetch(const float* row, int64_t width) {
  for (int64_t k = 0; k < width; k += kFloatsALine) __builtin_prefetch(row + k, 1);
}

constexpr int64_t kElementsARoot = 8192;  // few enough for the cache

// One update of touched rows, whose state lies at `places`. `updated` gets the rows' new values, side by side.
void adam_rows_(at::Tensor& param, at::Tensor& exp_avg, at::Tensor& exp_avg_sq, at::Tensor& updated,
                const at::Tensor& rows, const at::Tensor& places, const at::Tensor& grad, double scale, double lr,
                double beta1, double beta2, double eps, int64_t step, bool maximize) {
  constexpr const char* op = "adam_rows_";
  ZX_CHECK(param.dim() == 2, op, "param", "must have two dimensions, got ", param.sizes());
  const int64_t width = param.size(1);
  check_numbers(rows, op, "rows");
  check_numbers(places, op, "places");
  ZX_CHECK_NUMEL(places, rows.numel(), op, "places");
  check_values(param, param.size(0), width, op, "param");
  check_values(exp_avg, exp_avg.size(0), width, op, "exp_avg");
  check_values(exp_avg_sq, exp_avg.size(0), width, op, "exp_avg_sq");
  check_values(grad, rows.numel(), width, op, "grad");
  check_values(updated, rows.numel(), width, op, "updated");
  const RowNumbers named(rows);
  const RowNumbers placed(places);
  check_in_table(named, param.size(0), op);
  check_in_table(placed, exp_avg.size(0), op);
  const SparseAdam rule = SparseAdam::of(lr, beta1, beta2, eps, step);
  const float sign = maximize ? -1.0F : 1.0F;
  const auto factor = static_cast<float>(scale);
  auto* values = param.mutable_data_ptr<float>();
  auto* first = exp_avg.mutable_data_ptr<float>();
  auto* second = exp_avg_sq.mutable_data_ptr<float>();
  auto* out = updated.mutable_data_ptr<float>();
  const float* gradient = grad.const_data_ptr<float>();
  const int64_t most = std::max<int64_t>(1, kElementsARoot / width);  // rows whose roots are taken together
  parallel_units(named.size(), named.size() * width, [&](int64_t from, int64_t to) {
    for (int64_t start = from; start < to; start += most) {
      const int64_t stop = std::min(start + most, to);
      for (int64_t i = start; i < stop; ++i) {
        if (i + kAhead < to) {
          prefetch(first + placed[i + kAhead] * width, width);
          prefetch(second + placed[i + kAhead] * width, width);
          prefetch(values + named[i + kAhead] * width, width);
        }
        float* __restrict mean = first + placed[i] * width;
        float* __restrict square = second + placed[i] * width;
        float* __restrict result = out + i * width;
        const float* __restrict grads = gradient + i * width;
        for (int64_t k = 0; k < width; ++k) {
          rule.advance(sign * (grads[k] * factor), mean[k], square[k]);
          result[k] = square[k];
        }
      }
      at::Tensor roots = updated.narrow(0, start, stop - start);
      at::sqrt_(roots);
      for (int64_t i = start; i < stop; ++i) {
        float* __restrict value = values + named[i] * width;
        const float* __restrict mean = first + placed[i] * width;
        float* __restrict result = out + i * width;
        for (int64_t k = 0; k < width; ++k) {
          value[k] = rule.moved(value[k], mean[k], result[k]);
          result[k] = value[k];
        }
      }
    }
  });
}

// Rows that others have updated.
void put_rows_(at::Tensor& param, const at::Tensor& rows, const at::Tensor& values) {
  constexpr const char* op = "put_rows_";
  ZX_CHECK(param.dim() == 2, op, "param", "must have two dimensions, got ", param.sizes());
  const int64_t width = param.size(1);
  check_numbers(rows, op, "rows");
  check_values(param, param.size(0), width, op, "param");
  check_values(values, rows.numel(), width, op, "values");
  const RowNumbers named(rows);
  check_in_table(named, param.size(0), op);
  auto* to = param.mutable_data_ptr<float>();
  const float* from = values.const_data_ptr<float>();
  for (int64_t i = 0; i < named.size(); ++i, from += width) {
    if (i + kAhead < named.size()) prefetch(to + named[i + kAhead] * width, width);
    std::memcpy(to + named[i] * width, from, static_cast<size_t>(width) * sizeof(float));
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(zerox, CPU, m) {
  m.impl("sum_rows", &sum_rows);
  m.impl("deal_rows", &deal_rows);
  m.impl("adam_rows_", &adam_rows_);
  m.impl("put_rows_", &put_rows_);
}

}  // namespace zx
