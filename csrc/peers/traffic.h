// How much this rank sent to others, to be compared with closed formulas.
#pragma once

#include <atomic>
#include <cstdint>

namespace zx {

struct Traffic {
  std::atomic<int64_t> messages{0};
  std::atomic<int64_t> bytes{0};
};

}  // namespace zx
