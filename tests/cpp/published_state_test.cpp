// PublishedState, which a thread changes, read by others as ranks read each other's. The thread sanitizer runs it too.
#include "peers/published_state.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "peers/state_reader.h"

using namespace zx;

namespace {

using Values = std::vector<int64_t>;

// Two arrays, in turn in one or the other memory.
struct Places : PublishedState::Places {
  explicit Places(std::vector<const Values*> arrays) : arrays(std::move(arrays)) {}
  size_t count() const override { return arrays.size(); }
  void read(size_t place, size_t start, void* into, size_t bytes, bool /*follows_caller*/) const override {
    const auto address = reinterpret_cast<uint64_t>(arrays.at(place)->data()) + start;
    if (!read_memory(getpid(), address, into, bytes)) throw std::runtime_error("it can't be read");
  }
  void note_change() override {}
  void follow_change() const override {}
  std::vector<int64_t> addresses() const override {
    std::vector<int64_t> found;
    for (const Values* each : arrays) found.push_back(reinterpret_cast<int64_t>(each->data()));
    return found;
  }
  std::vector<const Values*> arrays;
};

struct Rank {
  std::shared_ptr<PublishedState> state = std::make_shared<PublishedState>();
  std::vector<Values> arrays{4, Values(512, 0)};
  StateReader reader{{getpid()}, {state->address()}};

  void move_to(int first) {
    state->begin_change();
    state->end_change(StateChange::of_all, true,
                      std::make_unique<Places>(std::vector<const Values*>{&arrays[first], &arrays[first + 1]}));
  }
};

// Changes a rank's state while others read it; `read(into)` returns the version of what it has read.
void check_no_mixtures(const std::function<std::optional<int64_t>(Rank&, int place, Values& into)>& read) {
  constexpr int kSteps = 3000;
  constexpr int kReaders = 2;
  Rank rank;
  rank.move_to(0);
  std::atomic<bool> is_over = false;
  std::atomic<int> num_read = 0;
  std::thread writer([&] {
    for (int64_t step = 1; step <= kSteps; ++step) {
      rank.state->begin_change();
      const int first = step % 2 == 0 ? 0 : 2;
      for (int each : {first, first + 1}) std::fill(rank.arrays[each].begin(), rank.arrays[each].end(), step);
      auto places = std::make_unique<Places>(std::vector<const Values*>{&rank.arrays[first], &rank.arrays[first + 1]});
      rank.state->end_change(StateChange::step, true, std::move(places));
      if (step % 16 == 0) std::this_thread::yield();
    }
    is_over = true;
  });
  std::vector<std::thread> readers;
  for (int i = 0; i < kReaders; ++i) {
    readers.emplace_back([&] {
      Values found(512);
      bool is_last = false;
      while (!is_last) {
        is_last = is_over;
        for (int place = 0; place < 2; ++place) {
          const auto version = read(rank, place, found);
          if (!version) continue;
          for (const int64_t each : found) CHECK_EQ(each, *version / StateStamp::kRound);
          ++num_read;
        }
      }
    });
  }
  writer.join();
  for (std::thread& each : readers) each.join();
  CHECK(num_read >= 2 * kReaders);
}

}  // namespace

TEST(what_is_read_is_never_a_mixture) {
  check_no_mixtures([](Rank& rank, int place, Values& into) -> std::optional<int64_t> {
    const auto stamp = rank.reader.stamp_since(0, 0);
    const auto addresses = stamp ? rank.reader.addresses(0, *stamp) : std::nullopt;
    if (!addresses) return std::nullopt;
    const auto from = static_cast<uint64_t>(addresses->at(place));
    if (!rank.reader.read(0, *stamp, from, into.data(), into.size() * sizeof(int64_t))) return std::nullopt;
    return stamp->version();
  });
}

TEST(what_its_own_process_reads_is_never_a_mixture) {
  check_no_mixtures([](Rank& rank, int place, Values& into) -> std::optional<int64_t> {
    const StateStamp stamp = rank.state->now();
    if (stamp.is_changing() || rank.state->num_places() != 2) return std::nullopt;
    if (!rank.state->read(stamp, place, 0, into.data(), into.size() * sizeof(int64_t))) return std::nullopt;
    return stamp.version();
  });
}

TEST(a_change_hides_the_state_until_it_ends) {
  Rank rank;
  rank.move_to(0);
  const auto before = rank.reader.stamp_since(0, 1);
  CHECK(before.has_value());
  CHECK_EQ(before->version(), int64_t{1});
  CHECK(!rank.reader.stamp_since(0, 2));
  rank.state->begin_change();
  rank.state->begin_change();
  CHECK(!rank.reader.stamp_since(0, 0));
  CHECK(!rank.reader.addresses(0, *before));
  rank.state->end_change(StateChange::step, true);
  CHECK(!rank.reader.stamp_since(0, 0));
  rank.state->end_change(StateChange::of_this_rank, true);
  CHECK_EQ(rank.reader.stamp_since(0, 0)->version(), StateStamp::kRound);
}

TEST(a_change_of_one_rank_leaves_its_version_and_not_its_stamp) {
  Rank rank;
  rank.move_to(0);
  const auto before = rank.reader.stamp_since(0, 1);
  rank.state->begin_change();
  rank.state->end_change(StateChange::of_this_rank, true);
  const auto after = rank.reader.stamp_since(0, 1);
  CHECK_EQ(after->version(), before->version());
  CHECK(after->word() != before->word());
  int64_t value = 0;
  CHECK(!rank.reader.read(0, *before, reinterpret_cast<uint64_t>(rank.arrays[0].data()), &value, sizeof(value)));
}

TEST(only_a_load_mends_what_has_broken_off) {
  Rank rank;
  {
    const PublishedState::Change change(*rank.state, StateChange::step);
  }
  CHECK(rank.reader.stamp_since(0, 0)->is_broken());
  {
    PublishedState::Change change(*rank.state, StateChange::step);
    change.done();
  }
  CHECK(rank.reader.stamp_since(0, 0)->is_broken());
  {
    PublishedState::Change change(*rank.state, StateChange::load);
    change.done();
  }
  CHECK(!rank.reader.stamp_since(0, 0)->is_broken());
}

TEST(steps_bring_versions_together_again) {
  Rank one, other;
  for (int i = 0; i < 3; ++i) one.move_to(0);
  other.move_to(0);
  CHECK(one.state->version() != other.state->version());
  for (Rank* each : {&one, &other}) {
    PublishedState::Change change(*each->state, StateChange::step);
    change.done();
  }
  CHECK_EQ(one.state->version(), other.state->version());
}

TEST(state_that_is_gone_is_no_version) {
  Rank rank;
  rank.move_to(0);
  const auto before = rank.reader.stamp_since(0, 0);
  rank.state.reset();
  CHECK(!rank.reader.addresses(0, *before));
  CHECK(rank.reader.stamp_since(0, 0)->version() > before->version());
}
