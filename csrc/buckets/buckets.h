// All buckets of an optimizer, which its rooms share, and the lock of what backward changes in them.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "buckets/bucket.h"
#include "lanes/process.h"

namespace zx {

// Note [Locks]
// Threads that meet here: autograd's (hooks; several where a model lies on several devices, or where Python's threads
// each run a backward), the lanes, a backend's, and the optimizer's caller: whoever calls step(), zero_grad() and the
// like, one thread at a time.
//
//   what                                   written by                       read by               guard
//   Buckets::all; of a Bucket and Slot     optimizer's caller, outside of   all                   no backward is open
//     what has no other line here          backward, in add_bucket()
//   Slot's hooks, fired to whole; p.grad;  hooks, optimizer's caller        the same              Buckets::mutex
//     Bucket::producers; all of Backward
//   Bucket::landed                         land lane; optimizer's caller    optimizer's caller    Flights::land() and
//                                          when flights have landed                               after_landing()
//   a Flight                               who launches, then its lane      the same              TwoLanes hands it on
//   what is in the air, the first error    who launches, both lanes         all                   TwoLanes, Sky::mutex
//   memory that crosses streams            who launches, both lanes         the same              Streams::mutex_
//   Settlement, Agreement, GradPlacement   optimizer's caller, or where     the same              Settlement::mutex_
//                                          backward ends
//   Params: the agreed order               optimizer's caller               the same              none
//   Gathers: what is under way             optimizer's caller               all who read          Gathers::mutex_
//   a Gather                               who comes first                  all who read          its once-flags,
//   mutex_ Whereabouts                            all                              all Whereabouts::mutex_
//
// Settlement::mutex_ is held while ranks wait for each other, and taken before Buckets::mutex; of the others a thread
// holds one at a time, and waits for nobody meanwhile.
//
// The GIL: who holds a lock may have to wait for the GIL, to free a tensor that Python has seen. So nobody waits for a
// lock, a lane or a rank while it holds the GIL: bindings release it first. Backend's threads may need it for the same
// reason, so whoever may be the last to hold a process group destroys it without the GIL.

struct Buckets {
  ProcessMutex mutex;
  std::vector<std::shared_ptr<Bucket>> all;

  Bucket& at(int64_t index) const { return *all.at(index); }

  int64_t num_slots() const {
    int64_t count = 0;
    for (const auto& bucket : all) count += static_cast<int64_t>(bucket->slots.size());
    return count;
  }

  // Calls each(slot, its place among the slots of all buckets).
  template <class Each>
  void for_each_slot(const Each& each) const {
    int64_t place = 0;
    for (const auto& bucket : all) {
      for (Slot& slot : bucket->slots) each(slot, place++);
    }
  }
};

// Functions that take it are called under Buckets::mutex.
using Locked = std::lock_guard<ProcessMutex>;

}  // namespace zx
