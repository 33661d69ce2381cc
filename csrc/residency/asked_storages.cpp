#include "residency/asked_storages.h"

#include <mutex>
#include <utility>

#include "params/own_storage.h"
#include "residency/lease.h"

namespace zx {

void AskedStorages::add(const at::Tensor& made) {
  if (hidden_ == HiddenReads::fault) return;
  const std::lock_guard lock(mutex_);
  storages_.push_back(made.storage().getWeakStorageImpl());
  tell(*made.storage().unsafeGetStorageImpl());
}

void AskedStorages::let_ask(bool may) {
  if (hidden_ == HiddenReads::fault) return;
  const std::lock_guard lock(mutex_);
  if (std::exchange(may_ask_, may) == may) return;
  const Lease::Postponed postponed;  // a storage may be nobody else's any more
  std::erase_if(storages_, [](const auto& each) { return each.expired(); });
  for (const auto& each : storages_) {
    if (const auto storage = each.lock()) tell(*storage);
  }
}

// Under the lock: whether its address may be asked for.
void AskedStorages::tell(c10::StorageImpl& storage) const {
  if (may_ask_) {
    allow_reads(storage);
  } else {
    forbid_reads(storage,
                 "zerox: a parameter is sharded (stage=3), and with ZEROX_FAULTS=0 a read that no operator shows can't "
                 "fetch it: read it inside optimizer.whole(), or by an operator, such as param.clone()");
  }
}

}  // namespace zx
