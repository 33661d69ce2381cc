// Cache and Uses: which buckets are whole, which go when room is short, and what keeps one.
#include "residency/cache.h"

#include <initializer_list>
#include <thread>

#include "check.h"
#include "residency/uses.h"

namespace {

using zx::Cache;
using zx::Copy;
using zx::Stays;
using zx::Uses;
using Buckets = std::vector<int64_t>;

// Buckets of these sizes, resident, of which all may go.
struct Rig {
  explicit Rig(std::initializer_list<size_t> sizes) {
    for (const size_t bytes : sizes) {
      uses.add();
      cache.add(bytes, /*is_table=*/false);
      cache[cache.size() - 1].may_go = true;
    }
  }

  // One is read after the other, and none is pinned any more.
  void read(std::initializer_list<int64_t> buckets) {
    for (const int64_t bucket : buckets) {
      cache.touch(bucket);
      cache.note_read(bucket);
    }
  }

  void release(std::initializer_list<int64_t> buckets) {
    for (const int64_t bucket : buckets) cache.note_release(bucket);
  }

  Uses uses;
  Cache cache{uses};
};

}  // namespace

// ---- bytes

TEST(bytes_are_those_of_what_has_memory) {
  Rig rig{10, 20, 30};
  CHECK_EQ(rig.cache.resident_bytes(), size_t{60});
  rig.release({1});
  CHECK_EQ(rig.cache.resident_bytes(), size_t{40});
  rig.cache.hold(1, 5);  // some rows of a table
  CHECK_EQ(rig.cache.resident_bytes(), size_t{45});
  CHECK_EQ(rig.cache.take_most_bytes(), size_t{60});
  CHECK_EQ(rig.cache.take_most_bytes(), size_t{45});
  rig.release({1});
  CHECK_EQ(rig.cache.resident_bytes(), size_t{40});
}

TEST(spare_memory_is_what_the_limit_leaves_and_what_is_about_to_be_taken) {
  Rig rig{10, 20};
  rig.cache.set_limit(50);
  CHECK_EQ(rig.cache.spare_bytes(0, 0), size_t{20});
  CHECK_EQ(rig.cache.spare_bytes(15, 15), size_t{20});
  CHECK_EQ(rig.cache.spare_bytes(15, 8), size_t{13});
  CHECK_EQ(rig.cache.spare_bytes(40, 40), size_t{40});
}

TEST(a_copy_is_up_to_date_if_all_of_it_is) {
  Rig rig{1};
  Copy& copy = rig.cache[0];
  CHECK(copy.is_up_to_date() && !copy.is_outdated());
  copy.is_stale = true;
  CHECK(!copy.is_up_to_date() && copy.is_outdated());
  copy.is_stale = false;
  copy.is_old = true;
  CHECK(!copy.is_up_to_date() && copy.is_outdated());
  rig.release({0});
  CHECK(!copy.is_up_to_date() && !copy.is_outdated());
  copy.state = Copy::State::arriving;
  CHECK(!copy.is_up_to_date());
}

// ---- what goes

TEST(nothing_goes_without_a_limit_or_within_it) {
  Rig rig{10, 10};
  CHECK(rig.cache.victims(size_t{1} << 40) == Buckets{});
  rig.cache.set_limit(30);
  CHECK(rig.cache.victims(10) == Buckets{});
  CHECK(!rig.cache.is_full(10) && rig.cache.is_full(11));
}

TEST(what_was_not_read_for_longest_goes_first_and_no_more_than_has_to) {
  Rig rig{10, 10, 10, 10};
  rig.read({2, 0, 3, 1});
  rig.cache.set_limit(40);
  CHECK(rig.cache.victims(1) == Buckets{2});
  CHECK(rig.cache.victims(10) == Buckets{2});
  CHECK((rig.cache.victims(11) == Buckets{2, 0}));
  CHECK((rig.cache.victims(40) == Buckets{2, 0, 3, 1}));
}

TEST(what_the_past_says_is_needed_latest_goes_first) {
  Rig rig{10, 10, 10, 10};
  rig.read({0, 1, 2, 3, 0, 1});  // 2 comes next, then 3, 0, 1
  rig.cache.set_limit(40);
  CHECK((rig.cache.victims(40) == Buckets{1, 0, 3, 2}));
  CHECK(rig.cache.victims(1) == Buckets{1});
}

TEST(what_the_past_does_not_tell_goes_before_what_it_does) {
  Rig rig{10, 10, 10};
  rig.read({0, 1, 0, 1});  // nobody has read 2
  rig.cache.set_limit(30);
  CHECK(rig.cache.victims(1) == Buckets{2});
}

TEST(what_is_pinned_or_could_not_come_back_stays) {
  Rig rig{10, 10, 10, 10};
  rig.uses.pin(0);
  rig.cache[1].may_go = false;
  rig.cache[2].state = Copy::State::arriving;
  rig.cache.set_limit(0);
  CHECK(rig.cache.victims(0) == Buckets{3});
  rig.uses.unpin(0);
  CHECK((rig.cache.victims(0) == Buckets{0, 3}));
}

TEST(a_released_table_goes_if_rows_of_it_are_here) {
  Rig rig{10, 10};
  rig.release({0, 1});
  CHECK(!rig.cache.may_be_released(0));
  rig.cache.hold(0, 4);
  rig.cache.set_limit(3);
  CHECK(rig.cache.victims(0) == Buckets{0});
  rig.release({0});
  CHECK_EQ(rig.cache.resident_bytes(), size_t{0});
}

TEST(a_victim_counts_for_the_memory_that_it_has) {
  Rig rig{10, 10, 10};
  rig.release({0});
  rig.cache.hold(0, 1);
  rig.read({0, 1, 2});
  rig.cache.set_limit(21);
  CHECK((rig.cache.victims(2) == Buckets{0, 1}));
}

// ---- what comes

TEST(the_bucket_that_is_needed_first_comes_ahead) {
  Rig rig{10, 10, 10, 10};
  rig.read({0, 1, 2, 3, 0, 1});  // 2 comes next, then 3
  rig.release({3});
  CHECK_EQ(rig.cache.next_to_fetch_ahead(), int64_t{3});
  rig.release({2});
  CHECK_EQ(rig.cache.next_to_fetch_ahead(), int64_t{2});
}

TEST(nothing_comes_ahead_that_the_past_does_not_tell_or_while_a_reader_waits) {
  Rig rig{10, 10, 10};
  rig.release({0, 2});
  CHECK_EQ(rig.cache.next_to_fetch_ahead(), int64_t{-1});
  rig.read({0, 1, 2, 0, 1});
  CHECK_EQ(rig.cache.next_to_fetch_ahead(), int64_t{2});
  rig.uses.pin(0);
  CHECK_EQ(rig.cache.next_to_fetch_ahead(), int64_t{-1});
}

TEST(tables_never_come_ahead) {
  Rig rig{10, 10, 10};
  rig.read({0, 1, 2, 0, 1});  // 2 comes next, then 0
  rig.release({0, 2});
  rig.cache[2].is_table = true;
  rig.uses.pin(2);  // a lookup waits for rows
  CHECK_EQ(rig.cache.next_to_fetch_ahead(), int64_t{0});
}

TEST(what_comes_ahead_takes_the_place_of_what_is_needed_later_only) {
  Rig rig{10, 10, 10};
  rig.read({0, 1, 2, 0, 1});  // 2 comes next, then 0 and 1
  rig.release({2});
  rig.cache.set_limit(10);
  CHECK_EQ(rig.cache.next_to_fetch_ahead(), int64_t{2});
  rig.uses.pin(0);
  CHECK_EQ(rig.cache.next_to_fetch_ahead(), int64_t{-1});
  rig.cache.set_limit(20);
  CHECK_EQ(rig.cache.next_to_fetch_ahead(), int64_t{2});
}

TEST(what_is_needed_sooner_is_not_released_for_what_comes_ahead) {
  Rig rig{10, 10, 10};
  rig.read({0, 1, 2, 0, 1});  // 2 comes next, then 0 and 1
  rig.release({1});
  rig.cache.set_limit(29);
  CHECK_EQ(rig.cache.next_to_fetch_ahead(), int64_t{-1});
  rig.cache.set_limit(30);
  CHECK_EQ(rig.cache.next_to_fetch_ahead(), int64_t{1});
}

TEST(what_is_pinned_and_what_arrives_leaves_less_room) {
  Rig rig{10, 20, 30};
  rig.cache.set_limit(40);
  CHECK(rig.cache.fits_beside_pinned(40));
  rig.uses.pin(0);
  CHECK(rig.cache.fits_beside_pinned(30) && !rig.cache.fits_beside_pinned(31));
  rig.cache[1].state = Copy::State::arriving;
  CHECK(rig.cache.fits_beside_pinned(10) && !rig.cache.fits_beside_pinned(11));
}

// ---- uses

TEST(who_waits_does_not_read) {
  Uses uses;
  uses.add();
  uses.pin(0);
  CHECK(uses.is_pinned(0) && uses.is_read(0) && !uses.is_read_by_another(0));
  uses.begin_wait(0);
  CHECK(uses.is_pinned(0) && !uses.is_read(0));
  uses.pin(0);
  CHECK(uses.is_read(0) && !uses.is_read_by_another(0));
  uses.end_wait(0);
  CHECK(uses.is_read_by_another(0) && uses.is_used_by_another(0));
  uses.unpin(0);
  uses.unpin(0);
  CHECK(!uses.is_pinned(0));
}

TEST(whole_pins_and_does_not_read) {
  Uses uses;
  uses.add();
  CHECK(uses.enter_whole());
  CHECK(!uses.enter_whole());
  uses.add();  // inside
  CHECK(uses.is_pinned(1) && !uses.is_read(1));
  uses.pin(0);
  uses.pin(0);
  CHECK(uses.is_whole() && !uses.is_read(0));
  uses.pin(0);
  CHECK(uses.is_read(0) && !uses.is_read_by_another(0) && uses.is_used_by_another(0));
  uses.leave_whole();
  CHECK(uses.is_whole());
  uses.leave_whole();
  CHECK(!uses.is_whole());
}

TEST(a_bucket_may_be_written_until_its_last_writer_ends) {
  Uses uses;
  uses.add();
  CHECK(!uses.may_be_written(0));
  CHECK(uses.begin_write(0));
  CHECK(!uses.begin_write(0));
  CHECK(!uses.end_write(0));
  CHECK(uses.may_be_written(0));
  CHECK(uses.end_write(0));
  CHECK(!uses.may_be_written(0));
  uses.enter_whole();
  CHECK(uses.may_be_written(0));
}

TEST(what_is_lent_is_pinned_and_written_until_it_is_let_go) {
  Uses uses;
  uses.add();
  CHECK(uses.lend(0));
  CHECK(uses.stays(0) == Stays::lent && uses.is_pinned(0) && uses.may_be_written(0));
  CHECK(!uses.let_go(0, Stays::kept));
  CHECK(uses.let_go(0, Stays::lent));
  CHECK(uses.stays(0) == Stays::no && !uses.is_pinned(0) && !uses.may_be_written(0));
  CHECK(!uses.let_go(0, Stays::lent));
}

TEST(what_is_kept_is_pinned_until_it_is_let_go) {
  Uses uses;
  uses.add();
  uses.keep(0, Stays::kept);
  CHECK(uses.stays(0) == Stays::kept && uses.is_pinned(0) && !uses.may_be_written(0));
  CHECK(uses.let_go(0, Stays::kept));
  CHECK(!uses.is_pinned(0));
}

TEST(each_thread_remembers_what_it_uses_of_each_optimizer) {
  Uses uses;
  const Uses others;
  uses.note_here(3);
  uses.note_here(3);
  uses.note_here(Uses::lookup_of(3));
  CHECK(uses.is_used_here(3) && uses.is_used_here(Uses::lookup_of(3)) && !uses.is_used_here(2));
  CHECK(!others.is_used_here(3));
  std::thread([&] { CHECK(!uses.is_used_here(3)); }).join();
  uses.forget_here(3);
  CHECK(uses.is_used_here(3));
  uses.forget_here(3);
  CHECK(!uses.is_used_here(3) && uses.is_used_here(Uses::lookup_of(3)));
  uses.forget_here(Uses::lookup_of(3));
  uses.forget_here(3);  // never noted: as after an operator that was pinned in another way
  CHECK(!uses.is_used_here(3));
}

TEST(a_lookup_is_told_from_a_use_of_the_whole_bucket) {
  CHECK(Uses::is_lookup(Uses::lookup_of(0)) && !Uses::is_lookup(0));
  CHECK_EQ(Uses::bucket_of(Uses::lookup_of(7)), int64_t{7});
  CHECK_EQ(Uses::bucket_of(7), int64_t{7});
}
