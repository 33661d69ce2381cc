// A sharded table: which rows each rank keeps, and which are here.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "params/read_guard.h"
#include "peers/neighbours.h"
#include "residency/address_range.h"
#include "residency/room.h"
#include "rows/row_owners.h"

namespace zx {

// Note [Rows are fetched by lookups]
// A table (a param group with sparse=True) is a resident as a bucket is, and differs in two things. Its shards are
// rows: each rank keeps those that it owns, in the order of zerox/memory/row_owners.py, and only there do they last.
// And a lookup by torch's operators of nn.Embedding and nn.EmbeddingBag names the rows that it reads: so these alone
// are fetched, to their places in the table, and only the pages that they lie in get memory. Whatever else reads the
// table fetches all of it, as of a bucket, with one warning.
//
// As long as not all rows are here, the table counts as released, and nobody may read its memory but lookups while they
// run: a read that nothing announces must fault, and not find zeros. Rows stay until room is needed, or until step().
//
// An accelerator's memory does not come in small pages. There all of the table gets memory while lookups run, of which
// only the rows that they name are filled, and it goes with the last of them: backward reads no rows. Streams order
// what is done to memory, not to rows of it, so nothing is fetched while another thread is looking up.

// Not thread-safe.
class TableRows {
 public:
  // `range`: null on an accelerator.
  TableRows(RowOwners owners, size_t row_bytes, std::shared_ptr<AddressRange> range);

  // A rank's whole shard, ascending in it and in the table.
  std::vector<BytePiece> shard_of(int rank) const;
  std::vector<int64_t> all() const;
  // What each of these rows is of the shard of `rank`, if that owns it. `rows`: ascending.
  std::vector<BytePiece> pieces_of(int rank, const std::vector<int64_t>& rows) const;
  // By owner: where these rows are in its shard, and in the table.
  std::vector<RowMoves> moves_by_owner(int num_owners, const std::vector<int64_t>& rows) const;

  // The rows that these indices (int32 or int64, on the host) name, and that are not here: ascending. What is no row is
  // left to the operator, which raises.
  std::vector<int64_t> missing(const at::Tensor& indices) const;
  // Whether a lookup may run of which these are missing: none, and on an accelerator there is memory for the table.
  bool may_run(const std::vector<int64_t>& missing) const { return missing.empty() && (has_pages() || has_some_); }
  // The bytes that they need beside those that have memory: of pages, or of the whole table.
  size_t more_bytes(const std::vector<int64_t>& rows) const;
  // They are here. Returns more_bytes().
  size_t note(const std::vector<int64_t>& rows);
  // NaN, in place of rows that have not come.
  void spoil(const std::vector<int64_t>& rows);
  // None is here.
  void forget();
  bool has_some() const { return has_some_; }
  // Of these rows, the bytes that `rank` does not own.
  int64_t bytes_of_others(int rank, const std::vector<int64_t>& rows) const;
  size_t row_bytes() const { return row_bytes_; }

  // How many lookups are running.
  void begin_lookup() { ++lookups_; }
  void end_lookup() { --lookups_; }
  bool is_looked_up() const { return lookups_ > 0; }

  bool has_pages() const { return range_ != nullptr; }
  AddressRange& range() { return *range_; }
  void let_go() { range_.reset(); }
  // Whether it has said that something else than a lookup reads it. True from the second call on.
  bool has_warned() { return std::exchange(has_warned_, true); }

 private:
  std::pair<size_t, size_t> pages_of(int64_t row) const;
  template <typename Do>
  void for_new_pages(const std::vector<int64_t>& rows, const Do& action) const;

  RowOwners owners_;
  size_t row_bytes_;
  std::shared_ptr<AddressRange> range_;
  std::vector<bool> here_;   // by row
  std::vector<bool> pages_;  // that have memory
  bool has_some_ = false;
  int64_t lookups_ = 0;
  bool has_warned_ = false;
};

// The indices by which an operator is about to look up rows of `table`, which is one of its arguments; null if it does
// something else, or to a part of it or a view that is not as the table lies in memory.
const at::Tensor* looked_up(const ReadGuard::Use& use, const at::Tensor& table, const Room& room, size_t row_bytes);

}  // namespace zx
