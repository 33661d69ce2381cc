// All buckets of an optimizer, which its parts share, and the lock on what backward changes in them.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "buckets/bucket.h"
#include "workers/process.h"

namespace zx {

// clang-format off
// Note [Locks]
// The threads that meet here are autograd's (hooks run on several of them if a model lies on several devices, or if
// several Python threads run backward), the workers, a backend's, and the optimizer's caller: the thread that calls
// step(), zero_grad() and the like. There is only one caller at a time.
//
//   data                                   written by                       read by             guard
//   Buckets::all; fields of Bucket and     optimizer's caller, in           all                 no backward is open
//     Slot that no other line names        add_bucket()
//   Slot's hooks, fired to whole; p.grad;  hooks, optimizer's caller        the same            Buckets::mutex
//     Bucket::producers; all of Backward
//   Buckets::is_unwatched; Watch           whoever calls Tensor.register_hook(), hooks  all     none, they are atomic
//   Bucket::reduced                         reduce worker; optimizer's caller  optimizer's caller  await_all() and
//                                          when flights have been reduced                             after_reduction()
//   a Flight                               its launcher, then its worker    the same            TwoWorkers hands it on
//   flights in the air, the first error    launchers, both workers          all                 TwoWorkers, Sky::mutex
//   memory that crosses streams            launchers, both workers          the same            Streams::mutex_
//   Synchronizer, Agreement, MeanGrads       optimizer's caller, or the       the same            Synchronizer::mutex_
//                                          thread on which backward ends
//   Params: the agreed order               optimizer's caller               the same            none
//   Gathers: gathers under way             optimizer's caller               all readers         Gathers::mutex_
//   a Gather                               the first thread that waits      all readers         its once-flags, mutex_
//   the levels of a gather on a mesh       the first thread that waits      all readers         TwoLevelExchange's mutex
//   FailureDetector                            all                              all                 FailureDetector::mutex_
//
// Synchronizer::mutex_ is held while ranks wait for each other, and is taken before Buckets::mutex. So is the mutex of
// TwoLevelExchange, before no other. A thread holds at most one of the other locks at a time, and waits for nothing
// while it holds it.
//
// The GIL: a thread that holds a lock may have to wait for the GIL, to free a tensor that Python has seen. So no thread
// may wait for a lock, a worker or a rank while it holds the GIL: bindings release it first. A backend's threads may
// need the GIL for the same reason, so a process group is destroyed without it. There is one exception: before a region
// that Dynamo compiled, which hides its reads, a thread waits for hidden gathers with the GIL (read_guard.cpp says why).
// clang-format on

struct Buckets {
  ProcessMutex mutex;
  std::vector<std::shared_ptr<Bucket>> all;
  int64_t num_dtensors = 0;                // parameters that are: see Note [Local tensors]
  std::atomic<bool> is_unwatched = false;  // a parameter may be: see Note [Hooks follow the parameter]

  Bucket& at(int64_t index) const { return *all.at(index); }

  int64_t num_slots() const {
    int64_t count = 0;
    for (const auto& bucket : all) count += static_cast<int64_t>(bucket->slots.size());
    return count;
  }

  // Calls each(slot, its position among the slots of all buckets).
  template <class Each>
  void for_each_slot(const Each& each) const {
    int64_t position = 0;
    for (const auto& bucket : all) {
      for (Slot& slot : bucket->slots) each(slot, position++);
    }
  }
};

// A function that takes a Locked is called under Buckets::mutex.
using Locked = std::lock_guard<ProcessMutex>;

}  // namespace zx
