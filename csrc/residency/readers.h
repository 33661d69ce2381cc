// What operators, and code without any, read and write of sharded parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "params/read_guard.h"
#include "residency/address_map.h"
#include "residency/bucket_copies.h"
#include "residency/faults.h"
#include "residency/lookups.h"
#include "residency/publisher.h"
#include "residency/python_functions.h"
#include "residency/turns.h"

namespace zx {

// Any thread may call any of these. In a forked child released parameters can't be fetched: see Note [Forks].
class Readers final : public ReadGuard::Watcher, public FaultReader {
 public:
  Readers(BucketCopies& copies, Turns& turns, Publisher& publisher)
      : copies_(copies), turns_(turns), publisher_(publisher), lookups_(copies, turns) {}
  ~Readers() override { stop(); }
  Readers(const Readers&) = delete;
  Readers& operator=(const Readers&) = delete;

  // Reads of all buckets that were added are seen from now on; or none that no operator announces; or none at all,
  // since the addresses, of all buckets or of the one in this room, may be others' from now on.
  void watch_added();
  void stop() { remove_fault_reader(this); }
  void forget_addresses();
  void forget_addresses_of(const Room& room, BucketCopies::Locked lock);

  // Returns when the bucket is resident, and it stays so. `reader`: null if that is no operator.
  void pin(int64_t bucket, const char* reader);

  // The bucket that a tensor lies in, or -1, also while that has not all of its first values.
  int64_t bucket_of(const at::Tensor& tensor) const;

  void forget_calls();
  size_t num_calls() const;

  // ---- ReadGuard::Watcher

  void before_read(const at::Tensor& tensor, const ReadGuard::Use& use) override;
  // Where they fault (see Note [Reads that nothing announces]) so do hidden writes. Elsewhere all are fetched.
  void before_hidden_reads(const char* reader, ReadGuard::Pins& pins) override;
  void before_function(const ReadGuard::PythonFunction& function, const ReadGuard::Pins& reads) override;
  void before_backward_of(const ReadGuard::PythonFunction& function, ReadGuard::Pins& pins) override;
  void after_operator(const ReadGuard::Pins& pins) override;
  bool has_seen_enough() const override { return false; }
  bool watches_all_threads() const override { return true; }
  bool watches_collectives() const override { return true; }
  void before_fork() override {}
  bool has_arrived() const override { return false; }  // a child finds some released

  // ---- FaultReader

  bool access_at(const void* address, bool is_write) override;

 private:
  int64_t place_of(const at::Tensor& tensor) const;
  void pin_here(int64_t bucket, const char* reader);
  void pin_for(int64_t bucket, const char* reader, ReadGuard::Pins& pins);
  void let_write(int64_t bucket);
  void refuse_collective(int64_t bucket);
  void end_use(const ReadGuard::Pin& pin, BucketCopies::Locked lock);
  std::string bring_at_fault(int64_t bucket);
  std::string let_write_be_lost(int64_t bucket, BucketCopies::Locked lock);

  BucketCopies& copies_;
  Turns& turns_;
  Publisher& publisher_;
  Lookups lookups_;
  AddressMap addresses_;       // of those whose reads fault; replaced under the lock of the copies
  PythonFunctions functions_;  // under that lock
};

}  // namespace zx
