// Note [Tags]
// Messages between two ranks are matched by tag. All ranks launch scatters in one order, gathers in one, and small
// all-reduces in one, but these come from different threads. So each kind counts for itself, in tags of its own.
#pragma once

#include <cstdint>
#include <utility>

namespace zx {

enum class TagKind : int {
  scatter = 0,
  gather = 1,
  small = 2,
  scatter_log = 3,
  gather_log = 4,
  question = 5,
  answer = 6,
  rows = 7,
  wanted = 8,
  state_question = 9,
  state_answer = 10,
  state_rest = 11,
};
constexpr unsigned kTagKinds = 16;  // room for this many
constexpr int kTagsEnd = 1 << 30;   // tags from here on belong to no kind

class Tag {
 public:
  Tag(TagKind kind, unsigned count) : kind_(kind), count_(count) {}
  int number() const { return static_cast<int>(kTagKinds * (count_ % (1U << 26U))) + static_cast<int>(kind_); }
  Tag operator++(int) { return {kind_, count_++}; }

 private:
  TagKind kind_;
  unsigned count_;
};

class Tags {
 public:
  explicit Tags(TagKind kind) : kind_(kind) {}
  // The first of `many` tags in a row.
  Tag next(int64_t many = 1) { return {kind_, std::exchange(count_, count_ + static_cast<unsigned>(many))}; }

 private:
  TagKind kind_;
  unsigned count_ = 0;
};

}  // namespace zx
