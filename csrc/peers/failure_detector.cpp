#include "peers/failure_detector.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <fstream>
#include <future>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include "locks.h"
#include "peers/tags.h"

namespace zx {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kStoreAnswers{1000};  // the store's host may be the one that is gone, or stopped
// A rank leaves its failure record before it closes its connections. But if a wait runs out of time, gloo closes them
// first.
constexpr milliseconds kFailureRecordFollows{500};
constexpr milliseconds kLateFailureRecordFollows{1500};  // if the rank's own wait runs out of time a little later
constexpr milliseconds kPoll{10};
constexpr int kMostContexts = 16;  // of one gloo group: one for each network interface that the user names

// Returns what `body` returns, unless it takes longer or throws. It may outlive this call, so it must own what it uses.
template <class Body>
auto within(milliseconds limit, Body body) -> std::optional<decltype(body())> {
  check_may_wait("the store");
  try {
    auto task = std::make_shared<std::packaged_task<decltype(body())()>>(std::move(body));
    auto answer = task->get_future();
    std::thread([task] { (*task)(); }).detach();
    if (answer.wait_for(limit) == std::future_status::ready) return answer.get();
  } catch (const std::exception&) {  // the store is gone, or there is no memory for a thread
  }
  return std::nullopt;
}

// As in /proc: 'Z' if the process is dead and its parent does not know it yet. 'X' if there is no such process.
char state_of(int64_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return 'X';
  const size_t end = text.rfind(") ");  // the end of its name
  return end == std::string::npos || end + 2 >= text.size() ? 'X' : text[end + 2];
}

// The failure record that a rank left in the store when it gave up.
struct FailureRecord {
  int suspected = kUnknownRank;
  bool late = false;   // the rank that it suspects did not come in time; if not, its connection ended
  std::string what{};  // the error that it raised itself, else empty

  std::string text() const { return std::to_string(suspected) + (late ? " late " : " gone ") + what; }
  static FailureRecord parse(const std::string& text) {
    FailureRecord failure_record;
    std::string how;
    std::istringstream stream(text);
    stream >> failure_record.suspected >> how;
    failure_record.late = how == "late";
    std::getline(stream >> std::ws, failure_record.what);
    return failure_record;
  }
};

std::string key_of(int rank) { return "failure record of rank " + std::to_string(rank); }

std::string outside_key_of(int rank) { return "where rank " + std::to_string(rank) + " stands outside"; }

// The ranks to blame, as the ranks' failure records tell.
struct Blame {
  std::vector<int> ranks{};
  bool late = false;
  std::string what{};
};

// Owns what it uses: see within().
struct Search {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int world;
  std::vector<int64_t> processes;
  std::chrono::steady_clock::time_point deadline;

  bool is_dead(int other) const {
    if (processes.empty() || processes[other] == 0) return false;
    const char state = state_of(processes[other]);
    return state == 'X' || state == 'Z';
  }

  std::optional<FailureRecord> failure_record_of(int other) const {
    if (!store->check({key_of(other)})) return std::nullopt;
    const std::vector<uint8_t> bytes = store->get(key_of(other));
    return FailureRecord::parse({bytes.begin(), bytes.end()});
  }

  bool goes_on() const {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kPoll);
    return true;
  }

  // Goes from the suspected rank to the one that it suspects, and so on, up to the one that left no failure record.
  Blame follow(int suspected, bool late) const {
    std::set<int> seen{rank};
    while (seen.insert(suspected).second) {
      std::optional<FailureRecord> failure_record;
      do {
        failure_record = failure_record_of(suspected);
      } while (!failure_record && !is_dead(suspected) && goes_on());
      if (!failure_record) failure_record = failure_record_of(suspected);  // it may have left one before it died
      if (!failure_record) return {{suspected}, late};
      if (!failure_record->what.empty()) return {{suspected}, false, failure_record->what};
      if (failure_record->suspected == kUnknownRank || failure_record->suspected == rank) return {{suspected}, late};
      suspected = failure_record->suspected;
      late = failure_record->late;
    }
    return {{suspected}, late};
  }

  // If the backend does not name a rank: a dead rank without a failure record is to blame, else all ranks
  // without one.
  Blame look_around(bool late) const {
    std::vector<int> silent;
    do {
      silent.clear();
      for (int other = 0; other < world; ++other) {
        if (other == rank) continue;
        const std::optional<FailureRecord> failure_record = failure_record_of(other);
        if (failure_record && !failure_record->what.empty()) return {{other}, false, failure_record->what};
        if (failure_record && failure_record->suspected != kUnknownRank && failure_record->suspected != rank) {
          return follow(failure_record->suspected, failure_record->late);
        }
        if (!failure_record && is_dead(other)) return {{other}};
        if (!failure_record) silent.push_back(other);
      }
    } while (goes_on());
    return {silent, late};
  }

  Blame find(int suspected, bool late) const {
    return suspected == kUnknownRank ? look_around(late) : follow(suspected, late);
  }
};

// The reason without the place in gloo's source, and without gloo's advice.
std::string shortened(std::string reason) {
  const size_t place = reason.starts_with("[") ? reason.find("] ") : std::string::npos;
  if (place != std::string::npos) reason.erase(0, place + 2);
  return reason.substr(0, std::min(reason.find(". This is typically"), reason.find('\n')));
}

std::string named(const std::vector<int>& ranks) {
  if (ranks.empty()) return "a rank";
  if (ranks.size() == 1) return "rank " + std::to_string(ranks.front());
  std::ostringstream text;
  for (const int rank : ranks) text << (rank == ranks.front() ? "one of the ranks " : ", ") << rank;
  return text.str();
}

std::string seconds(milliseconds time) {
  std::ostringstream text;
  text << std::chrono::duration<double>(time).count() << " s";
  return text.str();
}

}  // namespace

void abort_work(const Work& work) {
  try {
    work->abort();
  } catch (const c10::Error&) {  // gloo's collectives can't be aborted: they end with an answer, or the timeout
  }
}

FailureDetector::FailureDetector(std::vector<Group> groups, c10::intrusive_ptr<c10d::Store> store, int rank, int world,
                                 std::chrono::milliseconds timeout, std::chrono::milliseconds say_after)
    : connections_{std::move(groups)},
      store_(std::move(store)),
      rank_(rank),
      world_(world),
      timeout_(timeout),
      say_after_(say_after) {}

void FailureDetector::set_processes(std::vector<int64_t> processes) {
  const std::lock_guard lock(mutex_);
  processes_ = std::move(processes);
}

std::vector<int64_t> FailureDetector::processes() const {
  const std::lock_guard lock(mutex_);
  return processes_;
}

void FailureDetector::keep_aborted(const Work& work) {
  const std::lock_guard lock(mutex_);
  connections_.aborted.push_back(work);
}

void FailureDetector::add_control_block(std::shared_ptr<ControlBlock> control_block) {
  const std::lock_guard lock(mutex_);
  if (!conclusion_.empty()) (*control_block)[ControlBlock::status] = ControlBlock::kGaveUp;
  control_blocks_.push_back(std::move(control_block));
}

void FailureDetector::add_group(Group group, bool for_questions) {
  const std::lock_guard lock(mutex_);
  (for_questions ? connections_.for_questions : connections_.groups).push_back(std::move(group));
}

WaitingFor FailureDetector::waiting_for(int peer) const {
  WaitingFor found{rank_, peer == kUnknownRank ? "the other ranks" : named({peer}), last_seen_.text(), timeout_};
  if (store_ && peer != kUnknownRank) {
    found.stands_outside = [store = store_, key = outside_key_of(peer), own = num_outside_.load()] {
      const auto ask = [store, key] {
        const std::vector<uint8_t> bytes = store->check({key}) ? store->get(key) : std::vector<uint8_t>();
        return std::string(bytes.begin(), bytes.end());
      };
      std::istringstream text(within(kStoreAnswers, ask).value_or(""));
      int64_t number = 0;
      std::string where;
      text >> number;
      std::getline(text >> std::ws, where);
      return number > own ? where : "";
    };
  }
  return found;
}

void FailureDetector::stand_outside(const std::string& where) {
  if (!store_) return;
  const int64_t number = where.empty() ? num_outside_.load() : ++num_outside_;
  within(kStoreAnswers, [store = store_, key = outside_key_of(rank_), text = std::to_string(number) + " " + where] {
    store->set(key, std::vector<uint8_t>(text.begin(), text.end()));
    return true;
  });
}

// What to look at where a rank is missing from what this thread does.
std::string FailureDetector::advice() const {
  const Doing* doing = Doing::current();
  if (doing == nullptr || !last_seen_.is_anywhere()) return "";
  return ". See its log. " + (doing->per_batch()
                                  ? "Do all ranks run the same number of batches? If not, put their loops inside "
                                    "optimizer.join()"
                                  : "Do all ranks call " + doing->text() + "?");
}

void FailureDetector::await(const Awaited& awaited, const Group& group, int peer) {
  if (peer != kUnknownRank) check_may_wait("a message");  // of a collective, streams may wait
  // gloo's wait() returns false, instead of throwing, if it was aborted.
  const bool is_through = needing(peer, [&](LongWait& wait) {
    if (peer == kUnknownRank || connections_.groups.empty()) return awaited.work->wait();
    return wait.await(*group, *awaited.work, awaited.peer);
  });
  TORCH_CHECK(is_through, "the exchange was aborted");
}

std::string FailureDetector::suspect(int peer, Clock::duration waited, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (!conclusion_.empty()) return conclusion_;
  // If another thread's wait has run out of time, gloo closes this one's connection too.
  const bool late = waited >= timeout_ || reason.find("imed out") != std::string::npos ||
                    reason.find("Application timeout") != std::string::npos;
  give_up(peer, late, "");
  Blame blame{peer == kUnknownRank ? std::vector<int>{} : std::vector<int>{peer}, late};
  if (store_) {
    const milliseconds patience = late ? kLateFailureRecordFollows : kFailureRecordFollows;
    const Search search{store_, rank_, world_, processes_, Clock::now() + patience};
    blame = within(patience + kStoreAnswers, [search, peer, late] { return search.find(peer, late); }).value_or(blame);
  }
  std::ostringstream text;
  if (!blame.what.empty()) {
    text << blame.what;
  } else {
    text << named(blame.ranks)
         << (blame.late ? " did not come within " + seconds(timeout_)
                        : " is gone: its connection ended without a word, as it does when a process ends or is killed");
    text << " (last " << last_seen_.text() << "; the backend says: " << shortened(reason) << ")" << advice();
  }
  conclusion_ = text.str();
  return conclusion_;
}

void FailureDetector::leave(const std::string& what) {
  const std::lock_guard lock(mutex_);
  if (!conclusion_.empty()) return;
  conclusion_ = what;
  give_up(kUnknownRank, false, what);
}

void FailureDetector::end() {
  stand_outside("its end of the script");  // for who waits for an answer that does not come
  const std::lock_guard lock(mutex_);
  if (!conclusion_.empty()) return;
  conclusion_ = named({rank_}) + " has come to the end of its script";
  give_up(kUnknownRank, false, conclusion_, ControlBlock::kEnded);
}

// See Note [A rank that gives up says so].
void FailureDetector::give_up(int suspected, bool late, const std::string& what, int64_t status) {
  if (store_) {
    within(kStoreAnswers, [store = store_, key = key_of(rank_), text = FailureRecord{suspected, late, what}.text()] {
      return store->compareSet(key, std::string(), text);  // which waits for the store's answer
    });
  }
  for (const auto& control_block : control_blocks_) (*control_block)[ControlBlock::status] = status;
  if (!store_) return;
  for (const Group& group : connections_.groups) close_connections(group);
  if (status == ControlBlock::kEnded) return;
  for (const Group& group : connections_.for_questions) close_connections(group);
}

// A wait that runs out of time makes gloo close all connections of a context; there is no other way to ask for it.
void close_connections(const Group& group) {
  for (int context = 1; context <= kMostContexts; ++context) {  // tags take turns over them
    for (int peer = 0; peer < group->getSize(); ++peer) {  // a group along one axis of a mesh has a part of the ranks
      if (peer == group->getRank()) continue;
      std::vector<at::Tensor> message{at::zeros({1}, at::kByte)};
      try {
        // Throws if the connection is closed already.
        const Work never = group->recv(message, peer, kTagsEnd + context);
        never->wait(milliseconds(1));
      } catch (const std::exception&) {
      }
    }
  }
}

}  // namespace zx
