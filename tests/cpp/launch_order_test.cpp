// LaunchOrder against Note [Buckets launch in one order].
#include "grads/launch_order.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "check.h"

namespace {

using Buckets = std::vector<int64_t>;

zx::LaunchOrder order_of(const Buckets& order) {
  zx::LaunchOrder launch_order;
  for (size_t i = 0; i < order.size(); ++i) launch_order.add_bucket();
  launch_order.set_order(order);
  return launch_order;
}

}  // namespace

TEST(buckets_launch_in_layout_order_until_another_is_set) {
  zx::LaunchOrder order;
  for (int i = 0; i < 3; ++i) order.add_bucket();
  CHECK_EQ(order.order(), (Buckets{0, 1, 2}));
  order.set_order({2, 0, 1});
  order.add_bucket();
  CHECK_EQ(order.order(), (Buckets{2, 0, 1, 3}));
}

TEST(a_complete_bucket_waits_for_its_turn) {
  zx::LaunchOrder order = order_of({0, 1, 2});
  order.begin({2, 1, 1});
  CHECK_EQ(order.mark(2), Buckets{});
  CHECK_EQ(order.mark(0), Buckets{});
  CHECK_EQ(order.mark(1), Buckets{});
  CHECK(!order.complete());
  CHECK_EQ(order.mark(0), (Buckets{0, 1, 2}));
  CHECK(order.complete());
  CHECK_EQ(order.finish(), Buckets{});
}

TEST(a_set_order_decides_the_turns) {
  zx::LaunchOrder order = order_of({2, 0, 1});
  order.begin({1, 1, 1});
  CHECK_EQ(order.mark(0), Buckets{});
  CHECK_EQ(order.mark(2), (Buckets{2, 0}));
  CHECK_EQ(order.mark(1), Buckets{1});
}

TEST(finish_launches_the_rest_in_order_once) {
  zx::LaunchOrder order = order_of({3, 1, 0, 2});
  order.begin({1, 1, 2, 1});
  CHECK_EQ(order.mark(3), Buckets{3});
  CHECK_EQ(order.mark(0), Buckets{});
  CHECK_EQ(order.finish(), (Buckets{1, 0, 2}));
  CHECK(order.complete());
  CHECK_EQ(order.finish(), Buckets{});
}

TEST(nothing_launches_before_finish_where_it_is_held) {
  zx::LaunchOrder order = order_of({0, 1, 2});
  order.begin({1, 1, 1});
  CHECK_EQ(order.mark(0), Buckets{0});
  order.hold();
  CHECK_EQ(order.mark(2), Buckets{});
  CHECK(!order.complete());
  CHECK_EQ(order.mark(1), Buckets{});
  CHECK(order.complete());
  CHECK_EQ(order.finish(), (Buckets{1, 2}));
  CHECK_EQ(order.learned(), (Buckets{0, 2, 1}));
  order.begin({1, 1, 1});
  CHECK_EQ(order.mark(0), Buckets{0});
}

TEST(a_bucket_that_waits_for_nothing_holds_nobody_up) {
  zx::LaunchOrder order = order_of({0, 1, 2});
  order.begin({0, 1, 0});
  CHECK_EQ(order.mark(1), (Buckets{0, 1, 2}));
  order.begin({0, 0, 0});
  CHECK_EQ(order.finish(), (Buckets{0, 1, 2}));
}

TEST(no_buckets_are_complete_at_once) {
  zx::LaunchOrder order;
  order.begin({});
  CHECK(order.complete());
  CHECK_EQ(order.finish(), Buckets{});
  CHECK_EQ(order.learned(), Buckets{});
}

TEST(learned_puts_incomplete_buckets_last_in_the_old_order) {
  zx::LaunchOrder order = order_of({4, 0, 1, 2, 3});
  order.begin({1, 2, 1, 0, 1});
  order.mark(2);
  order.mark(1);
  order.mark(0);
  order.finish();
  CHECK_EQ(order.learned(), (Buckets{2, 0, 4, 1, 3}));
}

TEST(begin_forgets_the_pass_before) {
  zx::LaunchOrder order = order_of({0, 1});
  order.begin({1, 1});
  order.mark(1);
  order.begin({1, 1});
  CHECK(!order.complete());
  CHECK_EQ(order.learned(), (Buckets{0, 1}));
  CHECK_EQ(order.mark(0), Buckets{0});
}

// The model knows no state but what was marked: everything launched so far is the longest prefix of the order whose
// buckets have all their gradients.
TEST(any_sequence_of_marks_agrees_with_a_naive_model) {
  std::mt19937 random(0);
  const auto below = [&random](size_t limit) { return static_cast<size_t>(random() % limit); };
  for (int round = 0; round < 2000; ++round) {
    const size_t count = 1 + below(8);
    Buckets order(count);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    Buckets pending(count);
    Buckets marks;
    for (size_t bucket = 0; bucket < count; ++bucket) {
      pending[bucket] = static_cast<int64_t>(below(4));
      marks.insert(marks.end(), static_cast<size_t>(pending[bucket]), static_cast<int64_t>(bucket));
    }
    std::shuffle(marks.begin(), marks.end(), random);
    marks.resize(below(marks.size() + 1));  // the others stay absent

    zx::LaunchOrder tested = order_of(order);
    tested.begin(pending);
    Buckets launched;
    Buckets completed;
    Buckets missing = pending;
    for (const int64_t bucket : marks) {
      if (--missing[static_cast<size_t>(bucket)] == 0) completed.push_back(bucket);
      for (const int64_t now : tested.mark(bucket)) launched.push_back(now);
      Buckets prefix;
      for (const int64_t next : order) {
        if (missing[static_cast<size_t>(next)] != 0) break;
        prefix.push_back(next);
      }
      CHECK_EQ(launched, prefix);
      CHECK_EQ(tested.complete(), prefix.size() == count);
    }
    for (const int64_t now : tested.finish()) launched.push_back(now);
    CHECK_EQ(launched, order);
    for (const int64_t bucket : order) {
      if (std::find(completed.begin(), completed.end(), bucket) == completed.end()) completed.push_back(bucket);
    }
    CHECK_EQ(tested.learned(), completed);
  }
}
