// What stands in others' PublishedState, and where that points to: see Note [State is pulled].
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "peers/neighbours.h"
#include "peers/published_state.h"

namespace zx {

// Nothing here waits. Any thread may call any of these, which throw std::runtime_error for a rank that is gone.
class StateReader {
 public:
  // `processes`: of all ranks; `control_blocks`: the addresses of theirs.
  StateReader(std::vector<int64_t> processes, std::vector<uint64_t> control_blocks)
      : neighbours_(std::move(processes)), control_blocks_(std::move(control_blocks)) {}

  // The rank's stamp, if it has come to this version or gone beyond, and its state is not being changed.
  std::optional<StateStamp> stamp_since(int rank, int64_t version) const;
  // Of state with this stamp: where it lies. Nothing if it has another one by now.
  std::optional<std::vector<int64_t>> addresses(int rank, StateStamp stamp) const;
  // Copies what lies at an address of a rank. False if its state has another stamp than this by now.
  bool read(int rank, StateStamp stamp, uint64_t address, void* into, size_t bytes) const;

 private:
  int64_t word(int rank, PublishedState::Word which) const;
  bool is_still(int rank, StateStamp stamp) const { return word(rank, PublishedState::stamp) == stamp.word(); }

  const Neighbours neighbours_;
  const std::vector<uint64_t> control_blocks_;
};

}  // namespace zx
