// Where other ranks' state comes from: their memory, or messages. See Note [State is pulled].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "peers/long_waits.h"
#include "peers/published_state.h"

namespace zx {

// Any thread may call any of these, which throw for a rank that is gone. None needs the GIL.
class StateSource {
 public:
  StateSource() = default;
  virtual ~StateSource() = default;
  StateSource(const StateSource&) = delete;
  StateSource& operator=(const StateSource&) = delete;

  // Of a rank's state with this stamp. `addresses`: where it lies, if that is what is read.
  struct Directory {
    StateStamp stamp{};
    size_t num_places = 0;
    std::vector<int64_t> addresses{};
  };
  // The rank's, if its state has come to this version or gone beyond, and is not being changed.
  virtual std::optional<Directory> look(int rank, int64_t version, LongWait& wait) = 0;
  // Copies bytes of a place. False if the state has another stamp than the directory by now.
  virtual bool read(int rank, const Directory& from, size_t place, size_t start, const at::Tensor& into,
                    LongWait& wait) = 0;

  // Around calls of this rank's.
  virtual void begin_use() {}
  virtual void end_use() {}
};

}  // namespace zx
