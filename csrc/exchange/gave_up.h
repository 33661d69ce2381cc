// A rank that is looked for in memory, and will not come.
#pragma once

#include <stdexcept>

namespace zx {

// It looks as if the rank's connection had ended, and so errors say.
class GaveUp : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace zx
