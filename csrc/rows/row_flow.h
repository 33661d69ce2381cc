// A step of an optimizer's tables over the ranks: who has told whom what, what has been reduced, and what is to be sent
// again. See Note [Rows travel by themselves] in zerox/rows/rows.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "peers/neighbours.h"
#include "peers/peer_messages.h"
#include "rows/row_tables.h"

namespace zx {

// What happened to the gradients of tables since ranks last exchanged them; the larger number wins.
enum class RowChange : int64_t { unchanged, added, replaced };

// Functions that are collective are to be called by one thread, in the same order on all ranks.
class RowFlow {
 public:
  // `messages` has all ranks; `neighbours` too, or is empty, and then nothing is read from their memory.
  RowFlow(std::shared_ptr<PeerMessages> messages, Neighbours neighbours);

  // `own`: of a table that is sharded, the rows that this rank owns; else undefined.
  void add(TableSpec spec, at::Tensor param, at::Tensor own);

  // Packs this rank's p.grad of all tables, unless nothing has changed. Returns whether it could: if not, some gradient
  // is not of rows, or of rows that its table does not have.
  bool pack();
  // p.grad was zeroed or taken away: what was reduced is of another gradient.
  void forget();
  // p.grad is as it was exchanged, whatever was done to it since.
  void note_seen();

  // What ranks must know of each other before exchange(), as many numbers on all ranks: what has changed, of each table
  // whether there is a gradient, and how many rows each owner gets; in the memory of neighbours also where these are.
  std::vector<int64_t> header();
  // Collective, after pack(): the rows' owners reduce the mean, unless it is there. `headers`: what all
  // ranks told each other since then, by rank; none, and they do so now. `goes_on`: update() follows.
  RowChange exchange(const std::vector<int64_t>& headers, bool goes_on);
  // By table: nothing where no rank has a gradient.
  const std::vector<std::optional<ReducedRows>>& reduced() const { return reduced_; }

  // Collective: updates the rows that this rank owns, by a rule for each table, and where tables are whole, writes
  // those that others updated.
  void update(const std::vector<RowRule>& rules);
  // Collective: returns when nobody reads this rank's memory any more.
  void close();

 private:
  struct Seen {
    at::Tensor grad{};  // undefined if there was none
    uint32_t version = 0;
    bool is_seen = false;
  };
  RowChange change() const;
  std::vector<int64_t> tell();
  std::vector<at::Tensor> collect(const std::vector<int64_t>& addresses);
  void reduce(const std::vector<int64_t>& headers);

  std::shared_ptr<PeerMessages> messages_;
  Neighbours neighbours_;
  RowTables tables_;
  std::vector<at::Tensor> params_;
  std::vector<at::Tensor> values_;  // that are updated: of the whole table, or of the rows that this rank owns
  std::vector<Seen> seen_;
  Packed packed_;
  // What others may be reading. They have read it when they come to the next message.
  std::vector<at::Tensor> lent_;
  std::vector<std::optional<ReducedRows>> reduced_;
  at::Tensor counts_;  // of what has been reduced: int64 [W, tables, W], see Packed
};

}  // namespace zx
