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
std::mutex& addresses() {
  static auto* const one = new std::mutex;
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
  std::shared_ptr<DeviceRoom> made(new DeviceRoom(bytes, fetches));
  made->restore();
  {
    const UnseenOn on_fetches(fetches);
    made->memory_.zero_();
  }
  made->note_arrival();
  made->begin_use();
  return made;
}

DeviceRoom::DeviceRoom(size_t bytes, c10::Stream fetches)
    : bytes_(bytes),
      fetches_(fetches),
      nowhere_(bytes),
      address_(nowhere_.data()),
      arrival_{std::make_shared<c10::Event>(fetches.device_type())} {}

DeviceRoom::~DeviceRoom() {
  try {
    end_use();
    await_readers();
  } catch (const c10::Error&) {  // the device's runtime may be gone when the process exits
  }
}

// ---- streams

c10::Stream DeviceRoom::current() const { return internals::current_stream(fetches_.device()); }

c10::Event DeviceRoom::record(c10::Stream stream) const {
  c10::Event event(fetches_.device_type());
  event.record(stream);
  return event;
}

DeviceRoom::Reader& DeviceRoom::reader(c10::Stream stream) {
  const auto found =
      std::find_if(readers_.begin(), readers_.end(), [&](const Reader& each) { return each.stream == stream; });
  if (found != readers_.end()) return *found;
  return readers_.emplace_back(Reader{stream, c10::Event(stream.device_type())});
}

void DeviceRoom::begin_use() {
  const std::lock_guard lock(mutex_);
  const c10::Stream stream = current();
  if (std::find(arrival_.waited.begin(), arrival_.waited.end(), stream) != arrival_.waited.end()) return;
  arrival_.event->block(stream);
  arrival_.waited.push_back(stream);
}

void DeviceRoom::end_use() {
  const std::lock_guard lock(mutex_);
  const c10::Stream stream = current();
  reader(stream).last.record(stream);
}

void DeviceRoom::record_stream(c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  reader(stream).is_lasting = true;
}

// Under the lock: what the fetch stream does next comes after all reads.
void DeviceRoom::await_readers() {
  for (Reader& each : readers_) {
    if (each.is_lasting) each.last.record(each.stream);
    each.last.block(fetches_);
  }
  std::erase_if(readers_, [](const Reader& each) { return !each.is_lasting; });
}

// Under the lock, if others know the room.
void DeviceRoom::note_arrival() {
  arrival_.event = std::make_shared<c10::Event>(record(fetches_));
  arrival_.waited.clear();
}

// ---- memory

void DeviceRoom::release() {
  const std::lock_guard lock(mutex_);
  await_readers();
  readers_.clear();
  move_to(nowhere_.data());
  const UnseenOn on_fetches(fetches_);
  memory_.reset();
}

void DeviceRoom::restore() {
  const std::lock_guard lock(mutex_);
  if (memory_.defined()) return;
  const UnseenOn on_fetches(fetches_);
  memory_ = at::empty({static_cast<int64_t>(bytes_)}, at::TensorOptions(fetches_.device()).dtype(at::kByte));
  move_to(static_cast<char*>(memory_.mutable_data_ptr()));
}

void DeviceRoom::move_to(char* address) {
  const std::lock_guard lock(addresses());
  address_ = address;
  for (const Lodger& each : lodgers_) {
    const auto storage = each.storage.lock();
    if (storage == nullptr) continue;
    internals::move_storage(*storage, address + each.offset, &leave, fetches_.device());
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

bool DeviceRoom::has(const void* address) const {
  const std::lock_guard lock(mutex_);
  const auto* place = static_cast<const char*>(address);
  return place >= address_ && place < address_ + bytes_;
}

at::Tensor DeviceRoom::lodge(void* address, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  at::Tensor made = at::for_blob(address, sizes)
                        .strides(strides)
                        .context(new std::shared_ptr<DeviceRoom>(shared_from_this()), &leave)
                        .target_device(fetches_.device())
                        .options(at::TensorOptions(fetches_.device()).dtype(dtype))
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
                   at::TensorOptions().dtype(at::kByte).pinned_memory(fetches_.device().is_cuda()));
}

Room::Inbox DeviceRoom::inbox() {
  at::Tensor kept = pinned(bytes_);
  return {static_cast<char*>(kept.mutable_data_ptr()), kept};
}

void DeviceRoom::take_in(const Inbox& inbox, const std::vector<ByteSpan>& spans) {
  const std::lock_guard lock(mutex_);
  const UnseenOn on_fetches(fetches_);
  await_readers();
  for (const ByteSpan& each : spans) bytes_in(memory_, each).copy_(bytes_in(inbox.memory, each), /*non_blocking=*/true);
  note_arrival();
}

void DeviceRoom::pull(const at::Tensor& mapped, size_t start) {
  const std::lock_guard lock(mutex_);
  const UnseenOn on_fetches(fetches_);
  await_readers();
  arrival_.follows_pulls = true;  // also if what follows throws
  bytes_in(memory_, {start, start + mapped.nbytes()}).copy_(mapped, /*non_blocking=*/true);
  note_arrival();
}

void DeviceRoom::take_rows(const at::Tensor& source, const RowMoves& moves, size_t row_bytes) {
  if (moves.to.empty()) return;
  const std::lock_guard lock(mutex_);
  copy_rows(source, moves, row_bytes);
}

void DeviceRoom::pull_rows(const at::Tensor& mapped, const RowMoves& moves, size_t row_bytes) {
  const std::lock_guard lock(mutex_);
  arrival_.follows_pulls = true;  // also if what follows throws
  copy_rows(mapped, moves, row_bytes);
}

// Under the lock.
void DeviceRoom::copy_rows(const at::Tensor& source, const RowMoves& moves, size_t row_bytes) {
  const auto on_device = [this](const at::Tensor& host) { return host.to(fetches_.device(), /*non_blocking=*/true); };
  const auto indices = [&](const std::vector<int64_t>& rows) {
    const at::Tensor host = pinned(rows.size() * sizeof(int64_t)).view(at::kLong);
    std::memcpy(host.mutable_data_ptr(), rows.data(), host.nbytes());
    return on_device(host);
  };
  const UnseenOn on_fetches(fetches_);
  await_readers();
  const at::Tensor from = as_rows(source.is_cpu() ? on_device(source) : source, row_bytes);
  as_rows(memory_, row_bytes).index_copy_(0, indices(moves.to), from.index_select(0, indices(moves.from)));
  note_arrival();
}

void DeviceRoom::await_pulls() {
  std::shared_ptr<c10::Event> arrival;
  {
    const std::lock_guard lock(mutex_);
    if (!arrival_.follows_pulls) return;
    arrival = arrival_.event;
  }
  arrival->synchronize();
  const std::lock_guard lock(mutex_);
  if (arrival_.event == arrival) arrival_.follows_pulls = false;
}

void DeviceRoom::spoil(const std::vector<BytePiece>& own) {
  const std::lock_guard lock(mutex_);
  if (!memory_.defined()) return;
  const UnseenOn on_fetches(fetches_);
  await_readers();
  for (const ByteSpan& each : all_but(own)) bytes_in(memory_, each).fill_(0xff);
  note_arrival();
}

void DeviceRoom::take_shard(const at::Tensor& shard, const std::vector<BytePiece>& own) {
  const std::lock_guard lock(mutex_);
  const UnseenOn on_fetches(fetches_);
  await_readers();
  for (const BytePiece& each : own) in_room(memory_, each).copy_(in_shard(shard, each), /*non_blocking=*/true);
  note_arrival();
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
  const Unseen unseen;
  if (served.defined() && rows.defined()) {
    served.index_copy_(0, rows.to(at::kCPU), shard.index_select(0, rows).to(at::kCPU));
  } else if (served.defined()) {
    served.copy_(shard);
  }
  const c10::Event written = record(current());
  written.block(fetches_);
  written.synchronize();
}

// The host waits here, inside whole(), where the room keeps its memory.
uint64_t DeviceRoom::digest() {
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
