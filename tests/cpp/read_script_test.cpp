// ReadScript: what is needed next, as far as the past tells.
#include "residency/read_script.h"

#include <initializer_list>

#include "check.h"

namespace {

using zx::ReadScript;
using Uses = std::vector<int64_t>;
constexpr int64_t kNever = ReadScript::kNever;

void read(ReadScript& script, std::initializer_list<int64_t> buckets) {
  for (const int64_t bucket : buckets) script.note(bucket);
}

}  // namespace

TEST(nothing_is_known_of_the_first_reads) {
  ReadScript script;
  CHECK(script.next_uses(2) == (Uses{kNever, kNever}));
  read(script, {0, 1});
  CHECK(script.next_uses(2) == (Uses{kNever, kNever}));
}

TEST(a_read_of_the_same_bucket_is_no_other_read) {
  ReadScript script;
  CHECK(script.note(0));
  CHECK(!script.note(0));
  CHECK(script.note(1));
  CHECK(script.note(0));
}

TEST(a_step_is_as_the_last_one) {
  ReadScript script;
  read(script, {0, 1, 2, 3, 2, 1, 0, 1});
  // Where these two were read in a row for the first time, 2 and 3 followed. 0 comes when they have come back.
  CHECK(script.next_uses(4) == (Uses{5, 4, 1, 2}));
  read(script, {2, 3, 2});
  CHECK(script.next_uses(4) == (Uses{2, 1, 4, 5}));
}

TEST(what_the_past_lacks_is_needed_never) {
  ReadScript script;
  read(script, {0, 1, 2, 0, 1});
  CHECK(script.next_uses(4) == (Uses{2, 3, 1, kNever}));
}

TEST(another_order_is_followed_from_its_second_time_on) {
  ReadScript script;
  read(script, {0, 1, 2, 3, 0, 1, 2, 3, 0});
  CHECK(script.next_uses(4) == (Uses{4, 1, 2, 3}));
  read(script, {2});  // as never before
  CHECK(script.next_uses(4) == (Uses{kNever, kNever, kNever, kNever}));
  read(script, {1, 3, 0, 2});
  CHECK(script.next_uses(4) == (Uses{3, 1, 4, 2}));
}

TEST(old_reads_are_forgotten_and_others_are_found_all_the_same) {
  ReadScript script;
  for (size_t read = 0; read < 5 * ReadScript::kMost; ++read) {
    script.note(static_cast<int64_t>(read % 7));
    if (read % 97 == 0 && read > ReadScript::kMost) {
      const auto uses = script.next_uses(7);
      for (int64_t bucket = 0; bucket < 7; ++bucket) {
        const int64_t distance = (bucket - static_cast<int64_t>(read % 7) + 7) % 7;
        CHECK_EQ(uses[bucket], distance == 0 ? 7 : distance);
      }
    }
  }
}

TEST(a_guide_that_is_forgotten_is_looked_for_anew) {
  ReadScript script;
  read(script, {100, 101, 102});
  for (size_t read = 0; read < 2 * ReadScript::kMost; ++read) script.note(static_cast<int64_t>(read % 2));
  read(script, {100, 101});
  CHECK(script.next_uses(103)[102] == kNever);
}
