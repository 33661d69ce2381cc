// OtherReaders of one machine, which look into each other's control blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "peers/control_block.h"
#include "peers/neighbours.h"
#include "peers/other_readers.h"

namespace zx {

class ReadersInMemory final : public OtherReaders {
 public:
  // Of a control block that FailureDetector knows.
  enum Word : size_t { num_readers = ControlBlock::first_free, is_at_end, num_words };

  // `processes`: of all ranks, none of them 0; `control_blocks`: their addresses; `own`: this rank's.
  ReadersInMemory(std::vector<int64_t> processes, std::vector<uint64_t> control_blocks,
                  std::shared_ptr<ControlBlock> own);
  ~ReadersInMemory() override;

  void count_reader(int more) override { (*own_)[num_readers] += more; }
  void say_end() override { (*own_)[is_at_end] = 1; }
  bool may_read(int rank) const override;
  bool has_ended(int rank) const override;

 private:
  int64_t word(int rank, size_t which) const;

  const Neighbours neighbours_;
  const std::vector<uint64_t> control_blocks_;  // by rank
  const std::shared_ptr<ControlBlock> own_;
};

}  // namespace zx
