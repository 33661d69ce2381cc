#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>

#include <stdexcept>
#include <tuple>
#include <utility>

#include "rows/checks.h"
#include "rows/row_tables.h"

namespace zx {
namespace {

bool ascend_strictly(const int64_t* rows, int64_t count) {
  return std::adjacent_find(rows, rows + count, std::greater_equal<>()) == rows + count;
}

}  // namespace

// One table's gradient in ascending order of rows: element i of it is element order[i] of the gradient.
struct RowTables::Runs {
  at::Tensor sorted;
  at::Tensor order;               // int64; undefined if it is sorted as it is
  std::vector<int64_t> rows{};    // those that are there
  std::vector<int64_t> starts{};  // where each begins in `sorted`, and the end

  Runs(const LocalRows& grad, const RowOwners& owners) : sorted(grad.rows) {
    const int64_t count = sorted.numel();
    // Of equal rows in the order in which torch's coalesce() adds, which is that of its sort.
    if (!grad.is_summed || !ascend_strictly(sorted.const_data_ptr<int64_t>(), count)) {
      std::tie(sorted, order) = at::sort(sorted);
    }
    const auto* numbers = sorted.const_data_ptr<int64_t>();
    if (count > 0 && (numbers[0] < 0 || numbers[count - 1] >= owners.num_rows())) {
      const int64_t bad = numbers[0] < 0 ? numbers[0] : numbers[count - 1];
      throw std::out_of_range("names row " + std::to_string(bad) + " of " + std::to_string(owners.num_rows()));
    }
    rows.reserve(count);
    starts.reserve(count + 1);
    for (int64_t i = 0; i < count; ++i) {
      if (i > 0 && numbers[i] == numbers[i - 1]) continue;
      rows.push_back(numbers[i]);
      starts.push_back(i);
    }
    starts.push_back(count);
  }

  template <class Into>
  void sum(const at::Tensor& values, int64_t width, const Into& into) const {
    switch (values.scalar_type()) {
      case at::kBFloat16:
        return sum_of(values.const_data_ptr<c10::BFloat16>(), width, into);
      case at::kHalf:
        return sum_of(values.const_data_ptr<c10::Half>(), width, into);
      default:
        return sum_of(values.const_data_ptr<float>(), width, into);
    }
  }

  // Adds up the values of each row, in that order, and writes them to into(row).
  template <class T, class Into>
  void sum_of(const T* values, int64_t width, const Into& into) const {
    const int64_t* element = order.defined() ? order.const_data_ptr<int64_t>() : nullptr;
    const auto from = [&](int64_t i) { return values + (element == nullptr ? i : element[i]) * width; };
    const int64_t count = starts.back();
    for (size_t run = 0; run < rows.size(); ++run) {
      float* __restrict sums = into(rows[run]);
      const int64_t start = starts[run];
      if (start + kAhead < count) prefetch_row(from(start + kAhead), width * sizeof(T));
      const T* __restrict first = from(start);
      for (int64_t k = 0; k < width; ++k) sums[k] = static_cast<float>(first[k]);
      for (int64_t i = start + 1; i < starts[run + 1]; ++i) {
        if (i + kAhead < count) prefetch_row(from(i + kAhead), width * sizeof(T));
        const T* __restrict more = from(i);
        for (int64_t k = 0; k < width; ++k) sums[k] += static_cast<float>(more[k]);
      }
    }
  }
};

Packed RowTables::pack(const std::vector<LocalRows>& grads) const {
  check_length(grads.size(), tables_.size(), "grads");
  std::vector<Runs> runs;
  at::Tensor counts = at::empty({static_cast<int64_t>(tables_.size()), world_}, at::kLong);
  auto* count_of = counts.mutable_data_ptr<int64_t>();
  std::fill_n(count_of, counts.numel(), 0);
  for (size_t t = 0; t < tables_.size(); ++t, count_of += world_) {
    check_rows(grads[t].rows, "rows");
    check_shape(grads[t].values, grads[t].rows.numel(), tables_[t].width, "values");
    runs.emplace_back(grads[t], tables_[t].owners);
    for (const int64_t row : runs[t].rows) ++count_of[tables_[t].owners.owner_of(row)];
  }
  // Where each owner's message begins, and in it each table.
  count_of = counts.mutable_data_ptr<int64_t>();
  std::vector<int64_t> starts;
  std::vector<int64_t> begins{0};
  for (int64_t owner = 0; owner < world_; ++owner) {
    int64_t next = begins.back();
    for (size_t t = 0; t < tables_.size(); ++t) {
      starts.push_back(next);
      next += message_words(count_of[t * world_ + owner], tables_[t].owners.owned_by(owner), tables_[t].width);
    }
    begins.push_back(next);
  }
  const at::Tensor words = at::empty({begins.back()}, at::kInt);
  auto* data = words.mutable_data_ptr<int32_t>();
  for (size_t t = 0; t < tables_.size(); ++t) {
    const RowOwners& owners = tables_[t].owners;
    const int64_t width = tables_[t].width;
    std::vector<NameWriter> names;
    std::vector<float*> values;
    for (int64_t owner = 0; owner < world_; ++owner) {
      const int64_t count = count_of[t * world_ + owner];
      const int64_t owned = owners.owned_by(owner);
      int32_t* start = data + starts[owner * tables_.size() + t];
      names.emplace_back(start, count, owned);
      values.push_back(reinterpret_cast<float*>(start + name_words(count, owned)));
    }
    runs[t].sum(grads[t].values, width, [&](int64_t row) {
      const int32_t owner = owners.owner_of(row);
      names[owner].add(row, owners.place_of(row));
      return std::exchange(values[owner], values[owner] + width);
    });
  }
  Packed packed{.words = {}, .counts = counts};
  for (int64_t owner = 0; owner < world_; ++owner) {
    packed.words.push_back(words.narrow(0, begins[owner], begins[owner + 1] - begins[owner]));
  }
  return packed;
}

}  // namespace zx
