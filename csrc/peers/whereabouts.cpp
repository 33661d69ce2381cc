#include "peers/whereabouts.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <fstream>
#include <future>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include "peers/tags.h"

namespace zx {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kStoreAnswers{1000};  // the store's host may be the one that is gone, or stopped
// A rank leaves its farewell before it closes its connections. But if a wait runs out of time, gloo closes them first.
constexpr milliseconds kFarewellFollows{500};
constexpr milliseconds kLateFarewellFollows{1500};  // if the rank's own wait runs out of time a little later
constexpr milliseconds kPoll{10};
constexpr int kMostContexts = 16;  // of one gloo group: one for each network interface that the user names

// Returns what `body` returns, unless it takes longer or throws. It may outlive this call, so it must own what it uses.
template <class Body>
auto within(milliseconds limit, Body body) -> std::optional<decltype(body())> {
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

// The farewell that a rank left in the store when it gave up.
struct Farewell {
  int missed = kUnknownRank;
  bool late = false;   // the rank that it missed did not come in time; if not, its connection ended
  std::string what{};  // the error that it raised itself, else empty

  std::string text() const { return std::to_string(missed) + (late ? " late " : " gone ") + what; }
  static Farewell parse(const std::string& text) {
    Farewell farewell;
    std::string how;
    std::istringstream stream(text);
    stream >> farewell.missed >> how;
    farewell.late = how == "late";
    std::getline(stream >> std::ws, farewell.what);
    return farewell;
  }
};

std::string key_of(int rank) { return "farewell of rank " + std::to_string(rank); }

std::string outside_key_of(int rank) { return "where rank " + std::to_string(rank) + " stands outside"; }

// The ranks to blame, as the ranks' farewells tell.
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

  std::optional<Farewell> farewell_of(int other) const {
    if (!store->check({key_of(other)})) return std::nullopt;
    const std::vector<uint8_t> bytes = store->get(key_of(other));
    return Farewell::parse({bytes.begin(), bytes.end()});
  }

  bool goes_on() const {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kPoll);
    return true;
  }

  // Goes from the rank that was missed to the one that it missed, and so on, up to the one that left no farewell.
  Blame follow(int missed, bool late) const {
    std::set<int> seen{rank};
    while (seen.insert(missed).second) {
      std::optional<Farewell> farewell;
      do {
        farewell = farewell_of(missed);
      } while (!farewell && !is_dead(missed) && goes_on());
      if (!farewell) farewell = farewell_of(missed);  // it may have left one before it died
      if (!farewell) return {{missed}, late};
      if (!farewell->what.empty()) return {{missed}, false, farewell->what};
      if (farewell->missed == kUnknownRank || farewell->missed == rank) return {{missed}, late};
      missed = farewell->missed;
      late = farewell->late;
    }
    return {{missed}, late};
  }

  // If the backend does not say which rank it missed: a dead rank without a farewell is to blame, else all ranks
  // without one.
  Blame look_around(bool late) const {
    std::vector<int> silent;
    do {
      silent.clear();
      for (int other = 0; other < world; ++other) {
        if (other == rank) continue;
        const std::optional<Farewell> farewell = farewell_of(other);
        if (farewell && !farewell->what.empty()) return {{other}, false, farewell->what};
        if (farewell && farewell->missed != kUnknownRank && farewell->missed != rank) {
          return follow(farewell->missed, farewell->late);
        }
        if (!farewell && is_dead(other)) return {{other}};
        if (!farewell) silent.push_back(other);
      }
    } while (goes_on());
    return {silent, late};
  }

  Blame find(int missed, bool late) const { return missed == kUnknownRank ? look_around(late) : follow(missed, late); }
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

Whereabouts::Whereabouts(std::vector<Group> groups, c10::intrusive_ptr<c10d::Store> store, int rank, int world,
                         std::chrono::milliseconds timeout, std::chrono::milliseconds say_after)
    : groups_(std::move(groups)),
      store_(std::move(store)),
      rank_(rank),
      world_(world),
      timeout_(timeout),
      say_after_(say_after) {}

void Whereabouts::set_processes(std::vector<int64_t> processes) {
  const std::lock_guard lock(mutex_);
  processes_ = std::move(processes);
}

std::vector<int64_t> Whereabouts::processes() const {
  const std::lock_guard lock(mutex_);
  return processes_;
}

void Whereabouts::add_box(std::shared_ptr<MemoryBox> box) {
  const std::lock_guard lock(mutex_);
  if (!verdict_.empty()) (*box)[MemoryBox::gave_up] = 1;
  boxes_.push_back(std::move(box));
}

void Whereabouts::add_group(Group group) {
  const std::lock_guard lock(mutex_);
  groups_.push_back(std::move(group));
}

WaitingFor Whereabouts::waiting_for(int peer) const {
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

void Whereabouts::stand_outside(const std::string& where) {
  if (!store_) return;
  const int64_t number = where.empty() ? num_outside_.load() : ++num_outside_;
  within(kStoreAnswers, [store = store_, key = outside_key_of(rank_), text = std::to_string(number) + " " + where] {
    store->set(key, std::vector<uint8_t>(text.begin(), text.end()));
    return true;
  });
}

// What to look at where a rank is missing from what this thread does.
std::string Whereabouts::advice() const {
  const Doing* doing = Doing::current();
  if (doing == nullptr || !last_seen_.is_anywhere()) return "";
  return ". See its log. " + (doing->per_batch()
                                  ? "Do all ranks run the same number of batches? If not, put their loops inside "
                                    "optimizer.join()"
                                  : "Do all ranks call " + doing->text() + "?");
}

void Whereabouts::await(const Awaited& awaited, const Group& group, int peer) {
  // gloo's wait() returns false, instead of throwing, if it was aborted.
  const bool is_through = needing(peer, [&](LongWait& wait) {
    if (peer == kUnknownRank || groups_.empty()) return awaited.work->wait();
    return wait.await(*group, *awaited.work, awaited.peer);
  });
  TORCH_CHECK(is_through, "the exchange was aborted");
}

std::string Whereabouts::miss(int peer, Clock::duration waited, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (!verdict_.empty()) return verdict_;
  // If another thread's wait has run out of time, gloo closes this one's connection too.
  const bool late = waited >= timeout_ || reason.find("imed out") != std::string::npos ||
                    reason.find("Application timeout") != std::string::npos;
  give_up(peer, late, "");
  Blame blame{peer == kUnknownRank ? std::vector<int>{} : std::vector<int>{peer}, late};
  if (store_) {
    const milliseconds patience = late ? kLateFarewellFollows : kFarewellFollows;
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
  verdict_ = text.str();
  return verdict_;
}

void Whereabouts::leave(const std::string& what) {
  const std::lock_guard lock(mutex_);
  if (!verdict_.empty()) return;
  verdict_ = what;
  give_up(kUnknownRank, false, what);
}

// See Note [A rank that gives up says so].
void Whereabouts::give_up(int missed, bool late, const std::string& what) {
  if (store_) {
    within(kStoreAnswers, [store = store_, key = key_of(rank_), text = Farewell{missed, late, what}.text()] {
      return store->compareSet(key, std::string(), text);  // which waits for the store's answer
    });
  }
  for (const auto& box : boxes_) (*box)[MemoryBox::gave_up] = 1;
  if (store_) close_connections();
}

// A wait that runs out of time makes gloo close all connections of a context; there is no other way to ask for it.
void Whereabouts::close_connections() {
  for (const Group& group : groups_) {
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
}

}  // namespace zx
