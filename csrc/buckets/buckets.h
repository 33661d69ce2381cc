// All buckets of an optimizer, which its rooms share, and the lock of what backward changes in them.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "buckets/bucket.h"
#include "lanes/process.h"

namespace zx {

// clang-format off
// Note [Locks]
// Threads that meet here: autograd's (hooks run on several of them where a model lies on several devices, or where
// several of Python's threads run backward), the lanes, a backend's, and the optimizer's caller, which is the thread
// that calls step(), zero_grad() and the like: one at a time.
//
//   data                                   written by                       read by             guard
//   Buckets::all; what has no other line   optimizer's caller, in           all                 no backward is open
//     here of a Bucket and a Slot          add_bucket()
//   Slot's hooks, fired to whole; p.grad;  hooks, optimizer's caller        the same            Buckets::mutex
//     Bucket::producers; all of Backward
//   Bucket::landed                         land lane; optimizer's caller    optimizer's caller  Flights::land() and
//                                          when flights have landed                             after_landing()
//   a Flight                               its launcher, then its lane      the same            TwoLanes hands it on
//   flights in the air, the first error    launchers, both lanes            all                 TwoLanes, Sky::mutex
//   memory that crosses streams            launchers, both lanes            the same            Streams::mutex_
//   Settlement, Agreement, GradPlacement   optimizer's caller, or the       the same            Settlement::mutex_
//                                          thread on which backward ends
//   Params: the agreed order               optimizer's caller               the same            none
//   Gathers: gathers under way             optimizer's caller               all readers         Gathers::mutex_
//   a Gather                               the first thread that waits      all readers         its once-flags and mutex_
//   Whereabouts                            all                              all                 Whereabouts::mutex_
//
// Settlement::mutex_ is held while ranks wait for each other, and taken before Buckets::mutex. Of the other locks a
// thread holds one at a time, and waits for nothing while it holds it.
//
// The GIL: a thread that holds a lock may have to wait for the GIL, to free a tensor that Python has seen. So no thread
// waits for a lock, a lane or a rank while it holds the GIL: bindings release it first. A backend's threads may need it
// for the same reason, so a process group is destroyed without the GIL.
// clang-format on

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
