#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "rows/checks.h"
#include "rows/row_tables.h"

namespace zx {
namespace {

Master kind_of(const at::Tensor& master) {
  if (!master.defined()) return Master::none;
  return master.scalar_type() == at::kFloat ? Master::fp32 : Master::remainder;
}

}  // namespace

void RowTables::add(const TableSpec& spec) {
  RowOwners owners(spec.num_rows, world_, spec.of_block);
  const int64_t owned = owners.owned_by(rank_);
  spec.states.check(owned, spec.width);
  check_array(spec.step, at::kLong, 1, spec.step, "RowTables", "step");
  ZX_CHECK(spec.dtype != DType::f64, "RowTables", "param", "must be float32 or of 16 bits, got float64");
  if (spec.master.defined()) {
    const bool is_full = spec.master.scalar_type() == at::kFloat && spec.dtype != DType::f32;
    ZX_CHECK(is_full || (spec.master.scalar_type() == at::kShort && spec.dtype == DType::bf16), "RowTables", "master",
             "must be float32 beside 16-bit values or int16 beside bfloat16, got ", spec.master.scalar_type());
    check_shape(spec.master, owned, spec.width, "master");
  }
  tables_.push_back({std::move(owners), spec.width, spec.states, spec.master, spec.step,
                     static_cast<float>(spec.divisor), spec.dtype, spec.is_sharded});
}

bool RowTables::tells_of(const std::vector<bool>& present) const {
  check_length(present.size(), tables_.size(), "present");
  bool found = false;
  for (size_t t = 0; t < tables_.size(); ++t) found = found || (present[t] && !tables_[t].is_sharded);
  return found && world_ > 1;
}

// As many rows as ranks sent to an owner, or as it has.
int64_t RowTables::most_updated(size_t table, int64_t owner, const int64_t* counts) const {
  int64_t most = 0;
  for (int64_t rank = 0; rank < world_; ++rank) most += counts[(rank * tables_.size() + table) * world_ + owner];
  return std::min(most, tables_[table].owners.owned_by(owner));
}

// How many there are comes first, then their names and values, and the rest of the message is nothing.
int64_t RowTables::updated_words(size_t table, int64_t owner, const int64_t* counts) const {
  const int64_t most = most_updated(table, owner, counts);
  const Table& of = tables_[table];
  return 1 + message_words(most, of.owners.owned_by(owner), of.width, of.dtype);
}

std::vector<int64_t> RowTables::updated_words(const std::vector<bool>& present, const at::Tensor& counts) const {
  check_length(present.size(), tables_.size(), "present");
  const int64_t* count_of = checked(counts);
  std::vector<int64_t> found(world_, 0);
  for (int64_t owner = 0; owner < world_; ++owner) {
    for (size_t t = 0; t < tables_.size(); ++t) {
      if (present[t] && !tables_[t].is_sharded) found[owner] += updated_words(t, owner, count_of);
    }
  }
  return found;
}

at::Tensor RowTables::update(const std::vector<at::Tensor>& params,
                             const std::vector<std::optional<ReducedRows>>& reduced, const std::vector<RowRule>& rules,
                             const at::Tensor& counts) {
  check_length(params.size(), tables_.size(), "params");
  check_length(reduced.size(), tables_.size(), "reduced");
  check_length(rules.size(), tables_.size(), "rules");
  const int64_t* count_of = checked(counts);
  int64_t size = 0;
  for (size_t t = 0; t < tables_.size(); ++t) {
    size += reduced[t] && !tables_[t].is_sharded ? updated_words(t, rank_, count_of) : 0;
  }
  const at::Tensor words = at::empty({world_ == 1 ? 0 : size}, at::kInt);
  auto* next = words.mutable_data_ptr<int32_t>();
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (!reduced[t]) continue;
    Table& table = tables_[t];
    const ReducedRows& grad = *reduced[t];
    const int64_t count = grad.rows.numel();
    check_rows(grad.rows, "rows");
    check_rows(grad.places, "places");
    check_values(grad.values, count, table.width, "grads");
    const int64_t num_rows = table.is_sharded ? table.owners.owned_by(rank_) : table.owners.num_rows();
    const DType dtype = dtype_of(params[t], "RowTables", "params");
    ZX_CHECK(dtype == table.dtype, "RowTables", "params", "has another dtype now: ", params[t].scalar_type());
    check_shape(params[t], num_rows, table.width, "params");
    if (world_ == 1 || table.is_sharded) {
      update_one(table, params[t], grad, rules[t], nullptr);
      continue;
    }
    const int64_t most = most_updated(t, rank_, count_of);
    const int64_t owned = table.owners.owned_by(rank_);
    int32_t* const end = next + updated_words(t, rank_, count_of);
    *next++ = static_cast<int32_t>(count);
    NameWriter names(next, most, owned);
    for (int64_t i = 0; i < count; ++i) {
      names.add(grad.rows.const_data_ptr<int64_t>()[i], grad.places.const_data_ptr<int64_t>()[i]);
    }
    next += named_by_bits(most, owned) ? bit_words(owned) : count;
    const int64_t bytes = count * table.width * width_of(table.dtype);
    std::fill(next + bytes / 4, end, 0);
    update_one(table, params[t], grad, rules[t], next);
    next = end;
  }
  return words;
}

void RowTables::update_one(Table& table, const at::Tensor& param, const ReducedRows& grad, const RowRule& by,
                           void* updated) const {
  const TouchedRows touched{.count = grad.rows.numel(),
                            .width = table.width,
                            .rows = (table.is_sharded ? grad.places : grad.rows).const_data_ptr<int64_t>(),
                            .places = grad.places.const_data_ptr<int64_t>(),
                            .grads = grad.values.const_data_ptr<float>(),
                            .dtype = table.dtype,
                            .values = param.mutable_data_ptr(),
                            .master_kind = kind_of(table.master),
                            .master = table.master.defined() ? table.master.mutable_data_ptr() : nullptr};
  update_rows(by, table.states, table.step, touched, grad.rows.const_data_ptr<int64_t>(), updated);
}

void RowTables::put(const std::vector<at::Tensor>& params, const std::vector<bool>& present, const at::Tensor& counts,
                    const std::vector<at::Tensor>& words) const {
  const std::vector<int64_t> sizes = updated_words(present, counts);
  const int64_t* count_of = checked(counts);
  std::vector<int32_t> places;
  for (int64_t owner = 0; owner < world_; ++owner) {
    if (owner == rank_) continue;
    check_array(words.at(owner), at::kInt, sizes[owner], counts, "RowTables", "words");
    const auto* next = words[owner].const_data_ptr<int32_t>();
    for (size_t t = 0; t < tables_.size(); ++t) {
      if (!present[t] || tables_[t].is_sharded) continue;
      const RowOwners& owners = tables_[t].owners;
      const int64_t bytes = tables_[t].width * width_of(tables_[t].dtype);  // a row's
      const int64_t most = most_updated(t, owner, count_of);
      const int64_t owned = owners.owned_by(owner);
      const int64_t count = next[0];
      ZX_CHECK(count >= 0 && count <= most, "RowTables", "words", "says that it has ", count, " rows, of ", most);
      const int32_t* const end = next + updated_words(t, owner, count_of);
      read_names(++next, count, most, owner, owners, places);
      next += named_by_bits(most, owned) ? bit_words(owned) : count;
      const auto* from = reinterpret_cast<const char*>(next);
      auto* const to = static_cast<char*>(params[t].mutable_data_ptr());
      const auto place = [&](int64_t i) { return to + owners.row_at(owner, places[i]) * bytes; };
      for (int64_t i = 0; i < count; ++i, from += bytes) {
        if (i + kAhead < count) prefetch_row(place(i + kAhead), bytes);
        std::memcpy(place(i), from, static_cast<size_t>(bytes));
      }
      next = end;
    }
  }
}

}  // namespace zx
