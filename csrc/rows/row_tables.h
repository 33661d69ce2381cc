// The tables of an optimizer, whose gradients are rows, on their way: packed for their owners, added up there, updated,
// and written by all ranks. See Note [Rows travel by themselves] in zerox/rows/rows.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "math/dtype.h"
#include "rows/row_owners.h"
#include "rows/row_rule.h"

namespace zx {

struct TableSpec {
  int64_t num_rows;
  int64_t width;
  at::Tensor of_block;  // see RowOwners
  RowStates states;     // of the rows that this rank owns
  at::Tensor master;  // of 16-bit values, of the same rows: float32, or the int16 remainders; undefined if none is kept
  at::Tensor step;    // int64 scalar
  double divisor;     // of the sum over the ranks
  DType dtype;        // of the table
  bool is_sharded;    // each rank has the values of its own rows only, by place; else all ranks have the whole table
};

// A table's gradient on this rank: int64 [n], and [n, width] of float32 or 16 bits.
struct LocalRows {
  at::Tensor rows;
  at::Tensor values;
  bool is_summed;  // no row comes twice
};

// For each owner one message: of each table in turn the names of rows, then their values.
struct Packed {
  std::vector<at::Tensor> words;  // int32, by owner
  at::Tensor counts;              // int64 [tables, W]: how many rows of each table each owner gets

  // Where they begin in memory, one after the other.
  int64_t address() const { return words.empty() ? 0 : reinterpret_cast<int64_t>(words.front().storage().data()); }
};

// Words that lie one after the other in a rank's packed ones.
struct WordSpan {
  int64_t start;
  int64_t count;
};

// The mean of the rows of one table that this rank owns and that some rank touched, in ascending order.
struct ReducedRows {
  at::Tensor rows;    // int64 [n]
  at::Tensor places;  // int64 [n]
  at::Tensor values;  // float32 [n, width]
};

// Lists have an element for each table, or one for each table and rank, W numbers a table.
class RowTables {
 public:
  RowTables(int64_t rank, int64_t world) : rank_(rank), world_(world) {}

  void add(const TableSpec& spec);

  // Adds up this rank's rows of the same number, in float, in the order in which torch's coalesce() does, and sorts
  // them by owner. Throws std::out_of_range for a row that a table does not have.
  Packed pack(const std::vector<LocalRows>& grads) const;

  // From what every rank has told, int64 [W, tables, W] as Packed::counts: of each rank's words those for this rank.
  std::vector<WordSpan> words_from_each(const at::Tensor& counts) const;
  // Adds up what ranks sent, in their order, and divides.
  std::vector<ReducedRows> reduce(const std::vector<at::Tensor>& words, const at::Tensor& counts) const;

  // Updates tables of which something has been reduced. Returns the message about those that are whole, for all ranks.
  at::Tensor update(const std::vector<at::Tensor>& params, const std::vector<std::optional<ReducedRows>>& reduced,
                    const std::vector<RowRule>& rules, const at::Tensor& counts);
  // Whether there is such a message.
  bool tells_of(const std::vector<bool>& present) const;
  // How many words it has, by rank. It is as long as it could be, since ranks know how many rows each of them sent to
  // an owner, and not how many different ones.
  std::vector<int64_t> updated_words(const std::vector<bool>& present, const at::Tensor& counts) const;
  // Writes what other ranks have updated.
  void put(const std::vector<at::Tensor>& params, const std::vector<bool>& present, const at::Tensor& counts,
           const std::vector<at::Tensor>& words) const;

 private:
  struct Table {
    RowOwners owners;
    int64_t width;
    RowStates states;
    at::Tensor master;
    at::Tensor step;
    float divisor;
    DType dtype;
    bool is_sharded;
  };
  struct Runs;
  int64_t most_updated(size_t table, int64_t owner, const int64_t* counts) const;
  int64_t updated_words(size_t table, int64_t owner, const int64_t* counts) const;
  const int64_t* checked(const at::Tensor& counts) const;
  ReducedRows reduce_one(const Table& table, const std::vector<const int32_t*>& words,
                         const std::vector<int64_t>& counts) const;
  void update_one(Table& table, const at::Tensor& param, const ReducedRows& grad, const RowRule& by,
                  void* updated) const;

  int64_t rank_;
  int64_t world_;
  std::vector<Table> tables_;
};

}  // namespace zx
