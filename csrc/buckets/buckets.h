// All buckets of an optimizer, which its parts share, and the lock on what backward changes in them.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "buckets/bucket.h"
#include "locks.h"
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
//   flights in the air, the first error    launchers, both workers          all                 Airborne::mutex_
//   memory that crosses streams            launchers, both workers          the same            Streams::mutex_
//   Synchronizer, Agreement, MeanGrads     optimizer's caller, or the       the same            Synchronizer::mutex_
//                                          thread on which backward ends
//   Params: the agreed order               optimizer's caller               the same            none
//   Gathers: gathers under way             optimizer's caller               all readers         Gathers::mutex_
//   a Gather                               the first thread that waits      all readers         Gather::mutex_, or on
//                                                                                                 the host once-flags
//   the levels of a gather on a mesh       the first thread that waits      all readers         TwoLevelExchange's mutex
//   FailureDetector                        all                              all                 FailureDetector::mutex_
//   LastSeen                               all                              all                 LastSeen::mutex_
//   LongWaits; a LongWait's fields         all that wait, LongWaits'        the same            LongWaits::mutex_
//                                            thread
//   a FlightLog's rings, own and others'   launchers, reduce worker         the same            FlightLog::mutex_
//   a FlightLog's addresses of others      the first thread that needs one  the same            first_messages_
//   control blocks that outlive their log  whoever ends a log               none                keep_for_others()'s own
//   BeforeNext                             optimizer's caller               hooks               BeforeNext::mutex_
//   which hooks are zerox's own            whoever makes or ends a bucket   optimizer's caller  other_reducers.cpp's
//   the outer messages of a mesh's flight  reduce worker, who aborts it     the same            BothPending::mutex_
//   tasks of a Worker; free Permits        who posts, waits or runs them    the same            Worker::mutex_,
//                                                                                                 Permits::mutex_
//   a kernel's sum over its threads        at::parallel_for()'s threads     its caller          total_mutex
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
//   SharedStamps                           Publisher                        other ranks, all    none, they are atomic
//   Publisher's digests, AddressMap's      optimizer's caller               the same            none
//     snapshots
//   a DeviceRoom, and its RoomStreams      who fetches, releases or reads   the same            DeviceRoom::mutex_
//   addresses of an accelerator's          DeviceRoom                       readers             addresses()
//     storages
//   AskedStorages                          AddressRange                     the same            AskedStorages::mutex_
//   SparePages                             AddressRange                     the same            SparePages::mutex_
//   ShardServer                            its thread, Publisher            the same            ShardServer::mutex_
//   QuestionServer                         its thread, whoever answers      the same            QuestionServer::mutex_
//   Questions: tags                        whoever asks                     the same            Questions::mutex_
//   StateQuestions: who asks               whoever asks                     the same            StateQuestions::mutex_
//   StateServer: what is served            optimizer's caller               its thread          StateServer::mutex_
//   PeerStates: others' directories        whoever reads state              the same            PeerStates::mutex_
//   ReadersByMessage: who is gone          whoever lingers                  the same            ReadersByMessage::mutex_
//   Guards: watchers, roles, regions       whoever makes a ReadGuard, and   readers             Guards::mutex
//                                            readers
//   who handles SIGSEGV                    AddressRange, Readers            the same            fault_mutex()
//   shards that others may still read      whoever ends a Residency         the same            keep_for_others()'s own
//   which Residency objects there are      whoever makes one                the same            residency.cpp's all()
//   which Linger objects there are, and    whoever makes one, or deletes    the same, and the   linger.cpp's lists()
//     what lingers                         an optimizer                     thread that frees
//   PublishedState                         whoever changes state            readers             PublishedState::mutex_
//   StateTensors: a device's last change   whoever changes state            readers             StateTensors::mutex_
//   leases that ended under a lock         whoever lets go of a tensor      whoever ends one    lease.cpp's late()
//
// A thread takes them in this order, which csrc/locks.h has as a type, and holds at most one of a line:
//
//   Synchronizer::mutex_ (waits)
//   BeforeNext::mutex_
//   Buckets::mutex
//   Gathers::mutex_; Gather::mutex_ (waits)
//   TwoLevelExchange's mutex (waits); Residents::keep_for_others()'s own; linger.cpp's lists(); residency.cpp's all()
//   BucketCopies::mutex; Airborne::mutex_
//   DeviceRoom::mutex_; SparePages::mutex_; AskedStorages::mutex_; fault_mutex(); ShardServer::mutex_;
//     StateQuestions::mutex_; StateServer::mutex_; PeerStates::mutex_; ReadersByMessage::mutex_; BothPending::mutex_;
//     Streams::mutex_; Worker::mutex_; Permits::mutex_; FlightLog::first_messages_ (waits); FlightLog::mutex_;
//     ControlBlock::keep_for_others()'s own; other_reducers.cpp's
//   FailureDetector::mutex_ (waits in the end); LongWaits::mutex_; QuestionServer::mutex_; Questions::mutex_
//   LastSeen::mutex_
//   Guards::mutex
//   addresses(); total_mutex of a kernel; PublishedState::mutex_
//   StateTensors::mutex_; lease.cpp's late()
//
// A thread waits for no device, no message, no other rank and no other thread under any of them but these:
// - Synchronizer::mutex_ is held while ranks wait for each other.
// - Gather::mutex_ and TwoLevelExchange's: the first reader waits for messages under them. All who want one of them
//   need these values too. (On the host once-flags do the same.)
// - first_messages_: held until a neighbour's first message has come, which all who want it need.
// - FailureDetector::mutex_: a rank that gives up asks the store under it, for 2.5 s at most, and closes connections,
//   whatever else it holds. Nothing goes on there any more.
//
// What nests, and why that is no wait:
// - BeforeNext::mutex_: a hook does under it what users did to p.grad, which the others have to wait for.
// - Buckets::mutex: buckets are launched under it, so that all ranks launch them in one order. Where streams are the
//   workers, exchanges begin under it too.
// - FlightLog::mutex_: a log's first flight begins messages under it, which LongWaits hears of, and FailureDetector of
//   its control block.
// - LongWaits::mutex_: its thread aborts messages under it, and begins some that nothing receives. gloo makes it wait
//   for none of that.
// - BucketCopies::mutex: Fetcher and Publisher wait without it. (Torch's allocator may wait for a device under
//   DeviceRoom::mutex_, where memory is short.) A thread may wait on BucketCopies::changed, which lets go of it, but
//   only in the function that has taken the lock. Readers may take it with the GIL, so nothing is freed under it that
//   Python knows.
// - lease.cpp's late() is taken by whoever lets go of a tensor's last share under a room's locks.
// - ShardServer::mutex_: answers are sent under it, which waits for nothing.
// - Guards::mutex is taken by every operator that runs, under whatever lock; addresses() where a guard looks at a
//   tensor of an accelerator.
// - At a fork Guards::mutex and fault_mutex() are held together, in the order in which pthread_atfork() calls.
//
// The GIL: a thread that holds a lock may have to wait for the GIL, to free a tensor that Python has seen. So no thread
// may wait for a lock, a worker or a rank while it holds the GIL: bindings release it first. A backend's threads may
// need the GIL for the same reason, so a process group is destroyed without it. There is one exception: before a region
// that Dynamo compiled, which hides its reads, a thread waits for hidden gathers with the GIL (read_guard.cpp says why).
// clang-format on

struct Buckets {
  ProcessMutex<LockRank::buckets> mutex;
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
using Locked = std::lock_guard<ProcessMutex<LockRank::buckets>>;

}  // namespace zx
