// What ranks tell each other where they meet: at step(), and in stage 1 where backward ends.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bucket_manager/exchange.h"
#include "bucket_manager/slot_set.h"
#include "bucket_manager/small_all_reduce.h"

namespace zx {

// Where a rank stands.
enum class Place : int64_t { backward_end = 0, step = 1, clip = 2, synchronize = 3, unscale = 4 };

struct Statement {
  Place place;
  int64_t rounds;      // times that all buckets were launched since the last step
  int64_t own_rounds;  // those that a backward of this rank's launched
  bool failed;         // this rank's backward raised, and zero_grad() was not called since
  bool unsent;         // it has gradients that no flight took
  bool changed;        // it discarded reduced gradients and no flight told
  int64_t adoptions;   // parameters that became trainable
  bool scaled;         // it holds a gradient that mark_scaled() saw
  bool proposes;       // it knows in which order its forward needs buckets, and that is not agreed yet
  SlotSet with_grad;   // of which it holds a gradient, or stands by one that has left
};

struct Extreme {
  int64_t least;
  int64_t least_rank;
  int64_t most;
  int64_t most_rank;
};

struct Verdict {
  Extreme place;
  Extreme rounds;
  Extreme own_rounds;  // over the ranks that ran a backward; least is kNoBackward if none did
  Extreme failed;
  Extreme unsent;
  Extreme changed;
  Extreme adoptions;
  Extreme scaled;
  Extreme proposes;
  SlotSet with_grad;  // on any rank
};
constexpr int64_t kNoBackward = int64_t{1} << 32;

class Agreement {
 public:
  explicit Agreement(Line control) : control_(control), small_(std::move(control)) {}

  // Collective: every rank's statement in, the same verdict out. One all-reduce of 18 integers and a bit a parameter.
  Verdict agree(const Statement& statement);

  // All ranks go on to update.
  void step_begun() {
    if (control_.group) control_.whereabouts->step_begun();
  }

  // Collective: each byte's maximum over the ranks, in place.
  void take_largest(std::vector<uint8_t>& bytes);

  // Collective: a few integers on the CPU, combined over the ranks in place.
  void all_reduce(at::Tensor values, Combine combine) { small_.run(values, combine); }

  // Collective: rank 0's numbers.
  std::vector<int64_t> from_rank_0(std::vector<int64_t> numbers);

 private:
  auto all_max() {
    return [this](std::vector<at::Tensor>& tensors) { small_.run(tensors[0], Combine::max); };
  }

  Line control_;
  SmallAllReduce small_;
};

const char* name_of(int64_t place);

}  // namespace zx
