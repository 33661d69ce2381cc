// What ranks tell each other where they synchronize (sync_points.h), in one small message.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "buckets/slot_set.h"
#include "exchange/exchange.h"
#include "grads/sync_points.h"
#include "peers/small_all_reduce.h"

namespace zx {

// Of all rounds, those whose sums stay on the inner axis of a mesh: see Note [Sums that wait].
struct InnerRounds {
  int64_t count = 0;
  int64_t dropped = 0;    // a digest of what was discarded while sums waited, and when
  bool has_left = false;  // some wait
};

// Times that all buckets were launched since the last step.
struct Rounds {
  int64_t all = 0;
  int64_t own = 0;        // those that this rank's own backwards launched
  int64_t order = 0;      // a digest of which buckets these launched, in which order
  bool has_kept = false;  // this rank's gradients, since a wrapper's forward decided so
  InnerRounds inner{};
};

struct LocalStatus {
  Call call;
  Rounds rounds;
  bool failed;         // its backward raised or something else failed, and zero_grad() has not been called since
  bool unsent;         // it has gradients that no flight has taken
  bool changed;        // it discarded reduced gradients, and no flight has told their owners yet
  bool scaled;         // it holds a gradient that mark_scaled() saw
  bool zeroed;         // zero_grad() was called since the last sync point, or p.grad has lost the mean (MeanGrads)
  bool active;         // see SyncResult::num_active
  bool proposes;       // it knows the order in which its forward needs buckets, and none is agreed yet
  SlotSet with_grad;   // the slots whose gradient it holds, or stands by after it has left
  SlotSet placements;  // how gradients of DTensors came
  std::vector<int64_t> piggyback;  // what this rank tells each other one beside: see Synchronizer::set_piggyback
};

struct Extreme {
  int64_t least;
  int64_t least_rank;
  int64_t most;
  int64_t most_rank;
};

// The numbers of a local status whose extremes all ranks learn.
enum class Said : uint8_t {
  sync_point,  // least is SyncPoint::follow if some rank follows, most if all do
  active,      // the sync point of those that don't follow; least is kNowhere if all do
  rounds,
  own_rounds,    // of ranks that ran a backward; least is kNoBackward if none did
  inner_rounds,  // of the same
  outer_rounds,  // those that went on from the inner axis, of the same
  dropped,       // of the same
  less_dropped,  // its negative
  order,         // of the same
  less_order,    // its negative
  failed,
  unsent,
  changed,
  adoptions,
  scaled,
  zeroed,
  proposes,
  kCount,
};

// Of all ranks' local statuses.
struct ReducedStatus {
  std::array<Extreme, static_cast<size_t>(Said::kCount)> extremes;
  Arguments least_arguments;  // in some order, of those that don't follow
  Arguments most_arguments;
  bool has_same_options;
  bool has_same_operators;
  bool has_same_params;
  double operators;
  int64_t num_active;
  SlotSet with_grad;                // on any rank
  SlotSet placements;               // the same
  std::vector<int64_t> piggybacks;  // by rank, one after the other

  const Extreme& operator[](Said field) const { return extremes.at(static_cast<size_t>(field)); }
};
constexpr int64_t kNoBackward = int64_t{1} << 32;
constexpr int64_t kNowhere = int64_t{1} << 32;

// If a rank does not answer, each of these throws an error that says where that was, and what else is awaited.
class Agreement {
 public:
  // `trouble` tells what else is known to be wrong; its text is empty if nothing is.
  Agreement(Communicator control, std::function<std::string()> trouble)
      : control_(control), small_(std::move(control)), trouble_(std::move(trouble)) {}

  // Collective: takes every rank's local status, and returns the same reduced status to all. It is one all-reduce: two
  // integers for each Said and each argument, seven more, one bit per slot, or nine if it is a DTensor, and the
  // piggybacks of all ranks. Errors name what this thread is Doing.
  ReducedStatus agree(const LocalStatus& local_status);

  int64_t num_ranks() const { return control_.group ? control_.group->getSize() : 1; }
  // The call in which ranks agreed last.
  const std::string& where() const { return where_; }

  // Ends all communication with the other ranks, which raise `why` too.
  void leave(const std::string& why) {
    if (control_.group) control_.failure_detector->leave(why);
  }

  // To be called when all ranks go on to update.
  void step_begun() {
    if (control_.group) control_.failure_detector->step_begun();
  }

  // Collective: each byte's maximum over the ranks, in place.
  void take_largest(std::vector<uint8_t>& bytes);

  // Collective: a few integers on the CPU, combined over the ranks in place.
  void all_reduce(at::Tensor values, Combine combine);

  // Collective: returns one rank's text.
  std::string text_from(int64_t rank, const std::string& text);
  // Collective: returns rank 0's numbers.
  std::vector<int64_t> from_rank_0(std::vector<int64_t> numbers);

 private:
  void broadcast(std::vector<at::Tensor>& tensors, int64_t root);
  template <class Question>
  void ask(const Question& question);
  auto all_max() {
    return [this](std::vector<at::Tensor>& tensors) { small_.run(tensors[0], Combine::max); };
  }

  Communicator control_;
  SmallAllReduce small_;
  std::function<std::string()> trouble_;
  std::string where_;  // or are about to
};

}  // namespace zx
