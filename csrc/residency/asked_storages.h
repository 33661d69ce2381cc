// Which storages of sharded parameters may be asked for their addresses, where reads that nothing announces are to
// raise.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "locks.h"

namespace zx {

// What happens to such a read: it faults, see Note [Reads that nothing announces], or torch raises RuntimeError where
// it is asked for the address, as numpy() and data_ptr() ask it. It raises for whatever no operator is using: which
// buckets happen to be resident does not matter, and nobody is given memory that may be gone at the next operator.
enum class HiddenReads : uint8_t { fault, raise };

// Of one range of the host's. Any thread may call any of these; they do nothing where such reads fault.
class AskedStorages {
 public:
  explicit AskedStorages(HiddenReads hidden) : hidden_(hidden) {}

  // A tensor lies there.
  void add(const at::Tensor& made);
  bool reads_fault() const { return hidden_ == HiddenReads::fault; }
  // Whether all may be asked.
  void let_ask(bool may);

 private:
  void tell(c10::StorageImpl& storage) const;

  const HiddenReads hidden_;
  Mutex<LockRank::storages> mutex_;  // of those below
  bool may_ask_ = true;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};

}  // namespace zx
