#include "residency/device_room.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "buckets/address.h"
#include "residency/digest.h"
#include "residency/unseen.h"
#include "torch_internals.h"

namespace zx {
namespace {

// Of all storages' addresses.
Mutex<LockRank::addresses>& addresses() {
  static auto* const one = new Mutex<LockRank::addresses>;
  return *one;
}

at::Tensor bytes_in(const at::Tensor& bytes, Room::ByteSpan which) {
  return bytes.narrow(0, static_cast<int64_t>(which.start), static_cast<int64_t>(which.stop - which.start));
}

at::Tensor in_room(const at::Tensor& bytes, const BytePiece& piece) {
  return bytes_in(bytes, {piece.to, piece.to + piece.bytes});
}

at::Tensor in_shard(const at::Tensor& shard, const BytePiece& piece) {
  return bytes_in(shard.view(at::kByte).view({-1}), {piece.from, piece.from + piece.bytes});
}

void leave(void* room) { delete static_cast<std::shared_ptr<DeviceRoom>*>(room); }

// A tensor's bytes as rows, [n, words]: a table's values have 16 bits or more.
at::Tensor as_rows(const at::Tensor& values, size_t row_bytes) {
  const at::ScalarType word = row_bytes % 4 == 0 ? at::kInt : at::kShort;
  const auto words = static_cast<int64_t>(row_bytes / c10::elementSize(word));
  return values.view(at::kByte).view({-1}).view(word).view({-1, words});
}

}  // namespace

std::shared_ptr<DeviceRoom> DeviceRoom::make(size_t bytes, c10::Stream fetches) {
  return std::shared_ptr<DeviceRoom>(new DeviceRoom(bytes, fetches));
}

DeviceRoom::DeviceRoom(size_t bytes, c10::Stream fetches)
    : bytes_(bytes), nowhere_(bytes), streams_(fetches), address_(nowhere_.data()) {}

DeviceRoom::~DeviceRoom() {
  try {
    end_use();
    streams_.await_readers();
  } catch (const c10::Error&) {  // the device's runtime may be gone when the process exits
  }
}

// ---- streams

void DeviceRoom::begin_use() {
  const std::lock_guard lock(mutex_);
  streams_.begin_read();
}

void DeviceRoom::end_use() {
  const std::lock_guard lock(mutex_);
  streams_.end_read();
}

void DeviceRoom::record_stream(c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  streams_.note_lasting(stream);
}

// ---- memory

void DeviceRoom::release() {
  const std::lock_guard lock(mutex_);
  streams_.await_readers();
  streams_.forget_readers();
  move_to(nowhere_.data());
  const UnseenOn on_fetches(streams_.fetches());
  memory_.reset();
}

void DeviceRoom::restore() {
  const std::lock_guard lock(mutex_);
  if (memory_.defined()) return;
  const UnseenOn on_fetches(streams_.fetches());
  memory_ = at::empty({static_cast<int64_t>(bytes_)}, at::TensorOptions(streams_.device()).dtype(at::kByte));
  move_to(static_cast<char*>(memory_.mutable_data_ptr()));
}

void DeviceRoom::clear() {
  const std::lock_guard lock(mutex_);
  const UnseenOn on_fetches(streams_.fetches());
  streams_.await_readers();
  memory_.zero_();
  streams_.note_arrival();
}

void DeviceRoom::move_to(char* address) {
  const Lease::Postponed postponed;
  const std::lock_guard lock(addresses());
  address_ = address;
  for (const Lodger& each : lodgers_) {
    const auto storage = each.storage.lock();
    if (storage == nullptr) continue;
    internals::move_storage(*storage, address + each.offset, &leave, streams_.device());
  }
  std::erase_if(lodgers_, [](const Lodger& each) { return each.storage.expired(); });
}

// ---- tensors

[[maybe_unused]] const bool kIsFound = [] {
  find_unknown_memory_by(
      [](const at::Tensor& tensor) -> std::shared_ptr<UnknownMemory> { return DeviceRoom::of(tensor); });
  return true;
}();

std::shared_ptr<DeviceRoom> DeviceRoom::of(const at::Tensor& tensor) {
  // A storage that is being moved has the same deleter before, then and after, but no context for a moment.
  const c10::DataPtr& data = data_ptr_of(tensor);
  if (data.get_deleter() != &leave) return nullptr;
  const std::lock_guard lock(addresses());
  return *static_cast<const std::shared_ptr<DeviceRoom>*>(data.get_context());
}

const char* DeviceRoom::address() const {
  const std::lock_guard lock(mutex_);
  return address_;
}

at::Tensor DeviceRoom::lodge(void* address, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  at::Tensor made = at::for_blob(address, sizes)
                        .strides(strides)
                        .context(new std::shared_ptr(leases().let(shared_from_this())), &leave)
                        .target_device(streams_.device())
                        .options(at::TensorOptions(streams_.device()).dtype(dtype))
                        .make_tensor();
  const auto offset = static_cast<size_t>(static_cast<char*>(address) - address_);
  lodgers_.push_back({made.storage().getWeakStorageImpl(), offset});
  return made;
}

at::Tensor DeviceRoom::tensor(at::ScalarType dtype) {
  const std::lock_guard lock(mutex_);
  return lodge(address_, {static_cast<int64_t>(bytes_ / c10::elementSize(dtype))}, {1}, dtype);
}

at::Tensor DeviceRoom::with_own_storage(const at::Tensor& view) {
  TORCH_INTERNAL_ASSERT(view.is_non_overlapping_and_dense());
  const std::lock_guard lock(mutex_);
  return lodge(view.mutable_data_ptr(), view.sizes(), view.strides(), view.scalar_type());
}

// ---- values

// It is the allocator's again when the copies from it are over.
at::Tensor DeviceRoom::pinned(size_t bytes) const {
  const Unseen unseen;
  return at::empty({static_cast<int64_t>(bytes)},
                   at::TensorOptions().dtype(at::kByte).pinned_memory(streams_.device().is_cuda()));
}

Room::Inbox DeviceRoom::inbox() {
  at::Tensor kept = pinned(bytes_);
  return {static_cast<char*>(kept.mutable_data_ptr()), kept};
}

void DeviceRoom::take_in(const Inbox& inbox, const std::vector<ByteSpan>& spans) {
  const std::lock_guard lock(mutex_);
  const UnseenOn on_fetches(streams_.fetches());
  streams_.await_readers();
  for (const ByteSpan& each : spans) bytes_in(memory_, each).copy_(bytes_in(inbox.memory, each), /*non_blocking=*/true);
  streams_.note_arrival();
}

void DeviceRoom::pull(const at::Tensor& mapped, size_t start) {
  const std::lock_guard lock(mutex_);
  const UnseenOn on_fetches(streams_.fetches());
  streams_.await_readers();
  streams_.note_pull();  // also if what follows throws
  bytes_in(memory_, {start, start + mapped.nbytes()}).copy_(mapped, /*non_blocking=*/true);
  streams_.note_arrival();
}

void DeviceRoom::take_rows(const at::Tensor& source, const RowMoves& moves, size_t row_bytes) {
  if (moves.to.empty()) return;
  const std::lock_guard lock(mutex_);
  copy_rows(source, moves, row_bytes);
}

void DeviceRoom::pull_rows(const at::Tensor& mapped, const RowMoves& moves, size_t row_bytes) {
  const std::lock_guard lock(mutex_);
  streams_.note_pull();  // also if what follows throws
  copy_rows(mapped, moves, row_bytes);
}

// Under the lock.
void DeviceRoom::copy_rows(const at::Tensor& source, const RowMoves& moves, size_t row_bytes) {
  const auto on_device = [this](const at::Tensor& host) { return host.to(streams_.device(), /*non_blocking=*/true); };
  const auto indices = [&](const std::vector<int64_t>& rows) {
    const at::Tensor host = pinned(rows.size() * sizeof(int64_t)).view(at::kLong);
    std::memcpy(host.mutable_data_ptr(), rows.data(), host.nbytes());
    return on_device(host);
  };
  const UnseenOn on_fetches(streams_.fetches());
  streams_.await_readers();
  const at::Tensor from = as_rows(source.is_cpu() ? on_device(source) : source, row_bytes);
  as_rows(memory_, row_bytes).index_copy_(0, indices(moves.to), from.index_select(0, indices(moves.from)));
  streams_.note_arrival();
}

void DeviceRoom::await_pulls() {
  std::shared_ptr<c10::Event> last;
  {
    const std::lock_guard lock(mutex_);
    last = streams_.last_pull();
  }
  if (last == nullptr) return;
  check_may_wait("a device");
  last->synchronize();
  const std::lock_guard lock(mutex_);
  streams_.note_pulled(last);
}

void DeviceRoom::await_arrival() {
  std::shared_ptr<c10::Event> last;
  {
    const std::lock_guard lock(mutex_);
    last = streams_.arrival();
  }
  check_may_wait("a device");
  last->synchronize();
}

void DeviceRoom::spoil(const std::vector<BytePiece>& own) {
  const std::lock_guard lock(mutex_);
  if (!memory_.defined()) return;
  const UnseenOn on_fetches(streams_.fetches());
  streams_.await_readers();
  for (const ByteSpan& each : all_but(own)) bytes_in(memory_, each).fill_(0xff);
  streams_.note_arrival();
}

void DeviceRoom::take_shard(const at::Tensor& shard, const std::vector<BytePiece>& own) {
  const std::lock_guard lock(mutex_);
  const UnseenOn on_fetches(streams_.fetches());
  streams_.await_readers();
  for (const BytePiece& each : own) in_room(memory_, each).copy_(in_shard(shard, each), /*non_blocking=*/true);
  streams_.note_arrival();
}

// On the current stream, which has written the room.
void DeviceRoom::store_shard(const at::Tensor& shard, const std::vector<BytePiece>& own) {
  const std::lock_guard lock(mutex_);
  const Unseen unseen;
  for (const BytePiece& each : own) in_shard(shard, each).copy_(in_room(memory_, each), /*non_blocking=*/true);
}

at::Tensor DeviceRoom::served(const at::Tensor& shard) const {
  const Unseen unseen;
  return at::empty(shard.sizes(), shard.options().device(at::kCPU));
}

// The host waits here, once a step and bucket: others read the shard or its copy as soon as it is announced.
void DeviceRoom::serve(const at::Tensor& shard, const at::Tensor& served, const at::Tensor& rows) {
  check_may_wait("a device");
  const Unseen unseen;
  if (served.defined() && rows.defined()) {
    served.index_copy_(0, rows.to(at::kCPU), shard.index_select(0, rows).to(at::kCPU));
  } else if (served.defined()) {
    served.copy_(shard);
  }
  streams_.record_write().synchronize();
}

// The host waits here, inside whole(), where the room keeps its memory.
uint64_t DeviceRoom::digest() {
  check_may_wait("a device");
  at::Tensor memory;
  {
    const std::lock_guard lock(mutex_);
    memory = memory_;
  }
  const Unseen unseen;
  const at::Tensor now = memory.to(at::kCPU);
  end_use();
  return zx::digest(now.const_data_ptr(), bytes_);
}

}  // namespace zx
