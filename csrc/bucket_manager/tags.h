// Note [Tags]
// Messages between two ranks are matched by tag. All ranks launch scatters in one order, gathers in one, and small
// all-reduces in one, but these come from different threads: each kind counts for itself, in tags of its own.
#pragma once

namespace zx {

enum class TagKind : int { scatter = 0, gather = 1, small = 2 };

class Tags {
 public:
  explicit Tags(TagKind kind) : kind_(static_cast<int>(kind)) {}
  int next() { return static_cast<int>(4 * (count_++ % (1U << 28U))) + kind_; }

 private:
  unsigned count_ = 0;
  int kind_;
};

}  // namespace zx
