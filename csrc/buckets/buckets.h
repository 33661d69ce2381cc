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
//   Bucket::reduced                        reduce worker; optimizer's       optimizer's caller  await_all() and
//                                          caller when flights are reduced                      after_reduction()
//   a Flight                               its launcher, then its worker    the same            TwoWorkers hands it on
//   flights in the air, the first error    launchers, both workers          all                 TwoWorkers, Sky::mutex
//   memory that crosses streams            launchers, both workers          the same            Streams::mutex_
//   Synchronizer, Agreement, MeanGrads     optimizer's caller, or the       the same            Synchronizer::mutex_
//                                          thread on which backward ends
//   Params: the agreed order               optimizer's caller               the same            none
//   Gathers: gathers under way             optimizer's caller               all readers         Gathers::mutex_
//   a Gather                               the first thread that waits      all readers         its once-flags, mutex_
//   the levels of a gather on a mesh       the first thread that waits      all readers         TwoLevelExchange's mutex
//   FailureDetector                        all                              all                 FailureDetector::mutex_
//   LastSeen                               all                              all                 LastSeen::mutex_
//   LongWaits; a LongWait's fields         all that wait, LongWaits'        the same            LongWaits::mutex_
//                                            thread
//   a FlightLog's nodes, own and others'   launchers, reduce worker         the same            FlightLog::mutex_
//   a FlightLog's addresses of others      the first thread that needs one  the same            first_messages_
//   control blocks that outlive their log  whoever ends a log               none                keep_for_others()'s own
//   BeforeNext                             optimizer's caller               hooks               BeforeNext::mutex_
//   which hooks are zerox's own            whoever makes or ends a bucket   optimizer's caller  other_reducers.cpp's
//   the outer messages of a mesh's flight  reduce worker, who aborts it     the same            BothPending::mutex_
//
// Synchronizer::mutex_ is held while ranks wait for each other, and is taken before Buckets::mutex. So is the mutex of
// TwoLevelExchange, before no other. A thread holds at most one of the other locks at a time, but for those of sharded
// parameters, and waits for nothing while it holds it, with these exceptions:
// - The mutexes of a Gather and of TwoLevelExchange: the first reader waits for messages under them. All who want one
//   of them need these values too.
// - first_messages_: held until a neighbour's first message has come, which all who want it need. The wait for it is
//   listed under LongWaits::mutex_.
// - FlightLog::mutex_: a log's first flight begins messages under it, and so takes those of FailureDetector and
//   LongWaits. It waits for none of them.
// - FailureDetector::mutex_: a rank that gives up asks the store under it, for 2.5 s at most, and closes connections.
//   Nothing goes on there any more. LastSeen::mutex_ is taken under it.
// - LongWaits::mutex_: its thread takes LastSeen::mutex_ under it, aborts messages, and begins some that nothing
//   receives. gloo makes it wait for none of that.
// - BeforeNext::mutex_: a hook does under it what users did to p.grad, which the others have to wait for. It is taken
//   before all others but Synchronizer::mutex_.
//
// Sharded parameters (csrc/residency): readers are all threads that run operators, or touch parameters without one. A
// worker fetches buckets ahead, and a thread of ShardServer answers other ranks.
//
//   data                                   written by                       read by             guard
//   Cache, Uses, TableRows, Turns,         readers, worker, optimizer's     the same            BucketCopies::mutex
//     ResidencyReport, PythonFunctions       caller
//   Publisher's version;                   optimizer's caller; readers      the same, worker    BucketCopies::mutex
//     ShardedBucket::written                 that write
//   a ShardedBucket's other fields         optimizer's caller               all                 BucketCopies::mutex; or
//                                                                                                 that it is pinned
//   a bucket's memory: comes, goes         who fetches or releases it       readers             its pins (Uses) and
//                                                                                                 state (Cache)
//   AddressMap                             optimizer's caller               readers             none, it is atomic
//   SharedStamps                           Publisher                        other ranks         none, they are atomic
//   Publisher's digests, AddressMap's      optimizer's caller               the same            none
//     snapshots
//   a DeviceRoom, and its RoomStreams      who fetches, releases or reads   the same            DeviceRoom::mutex_
//   addresses of an accelerator's          DeviceRoom                       readers             addresses()
//     storages
//   storages that are to raise             AddressRange                     the same            its storages_mutex_
//   SparePages                             AddressRange                     the same            SparePages::mutex_
//   ShardServer                            its thread, Publisher            the same            ShardServer::mutex_
//   ShardQuestions: tags                   whoever asks                     the same            ShardQuestions::mutex_
//   Guards: watchers, roles, regions       whoever makes a ReadGuard, and   readers             Guards::mutex
//                                            readers
//   who handles SIGSEGV                    AddressRange, Readers            the same            fault_mutex()
//   shards that others may still read      whoever ends a Residency         the same            keep_for_others()'s own
//   which Residency objects there are      whoever makes one                the same            residency.cpp's all()
//   leases that ended under a lock         whoever lets go of a tensor      whoever ends one    lease.cpp's late()
//
// They are taken in this order, and those that share a line are not held together:
//
//   keep_for_others()'s own
//   BucketCopies::mutex
//   DeviceRoom::mutex_, SparePages::mutex_, storages_mutex_, fault_mutex(), a Worker's; ShardServer::mutex_
//   addresses()
//   lease.cpp's late()
//
// residency.cpp's all() is taken without any other. BucketCopies::mutex is never held together with ShardServer::mutex_. A thread waits for no device, no message and no
// other rank under any of them: Fetcher and Publisher do so without, and ShardServer sends answers under its mutex, and
// waits for none. (Torch's allocator may wait for a device under DeviceRoom::mutex_, where memory is short.) Under
// BucketCopies::mutex a thread may wait on BucketCopies::changed, which lets go of it, but only in the function that has
// taken the lock. Readers may take it with the GIL, so nothing is freed under it that Python knows.
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
