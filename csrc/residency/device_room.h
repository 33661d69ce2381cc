// Memory of an accelerator that comes and goes, in the order of its streams.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "locks.h"
#include "params/own_storage.h"
#include "residency/address_range.h"
#include "residency/room.h"
#include "residency/room_streams.h"

namespace zx {

// Note [Rooms on an accelerator]
// The host says when a room comes and goes, and runs ahead of the device, so both are ordered by streams:
//
//   last reads (streams of operators) --event--> the room's memory is free, and filled again (fetch stream)
//   the room is filled (fetch stream) --event--> next reads (streams of operators)
//
// All memory is allocated on the fetch stream, which waits for the last reads of a room before it lets go of it. So the
// allocator may hand it out again at once, on that stream. The event after a read is recorded when the operator is
// over, not when the room goes: a fetch must not wait for what was launched in between. The host waits for nothing.
//
// Where a room has other memory, the storages in it are moved there, the same StorageImpl each: those of the buffer, of
// its parameters, and so of all their views. While it has none, they lie at addresses of the host that nobody may read:
// so a tensor's address tells where in the bucket it lies, released or not, and a kernel that reads one unannounced
// fails instead of finding another bucket's values.
//
// Others' shards are copied from their devices' memory on the fetch stream too, if that is mapped here: see
// Note [Shards in a device's memory]. Else they come through the host's memory, where each rank keeps a copy of its
// shard as of the last step: any rank pulls it from there, as on hosts (Note [Shards are pulled]), and copies it up.

// Any thread may call any of these. The lock is held for moments, since operators take it: what waits for the device
// does so without.
class DeviceRoom final : public Room, public UnknownMemory, public std::enable_shared_from_this<DeviceRoom> {
 public:
  static std::shared_ptr<DeviceRoom> make(size_t bytes, c10::Stream fetches);
  ~DeviceRoom() override;

  // The room that a tensor lies in, null if in none.
  static std::shared_ptr<DeviceRoom> of(const at::Tensor& tensor);
  void record_stream(c10::Stream stream) override;
  c10::Stream fetches() const { return streams_.fetches(); }

  size_t bytes() const override { return bytes_; }
  const char* address() const override;
  at::Tensor tensor(at::ScalarType dtype) override;
  at::Tensor with_own_storage(const at::Tensor& view) override;
  void release() override;
  void restore() override;
  void clear() override;
  void let_write(bool /*may*/) override {}
  void restore_in_child() override {}  // no child may use the device
  Inbox inbox() override;
  void take_in(const Inbox& inbox, const std::vector<ByteSpan>& spans) override;
  void pull(const at::Tensor& mapped, size_t start) override;
  // Rows of a table, `row_bytes` each: of `source`, on the device or pinned() on the host; and as pull(), of others'.
  at::Tensor pinned(size_t bytes) const;
  void take_rows(const at::Tensor& source, const RowMoves& moves, size_t row_bytes);
  void pull_rows(const at::Tensor& mapped, const RowMoves& moves, size_t row_bytes);
  void await_pulls() override;
  void await_arrival() override;
  void spoil(const std::vector<BytePiece>& own) override;
  void take_shard(const at::Tensor& shard, const std::vector<BytePiece>& own) override;
  void store_shard(const at::Tensor& shard, const std::vector<BytePiece>& own) override;
  at::Tensor served(const at::Tensor& shard) const override;
  void serve(const at::Tensor& shard, const at::Tensor& served, const at::Tensor& rows) override;
  void begin_use() override;
  void end_use() override;
  uint64_t digest() override;

 private:
  struct Lodger {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    size_t offset;
  };

  DeviceRoom(size_t bytes, c10::Stream fetches);
  at::Tensor lodge(void* address, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
  void move_to(char* address);
  void copy_rows(const at::Tensor& source, const RowMoves& moves, size_t row_bytes);

  const size_t bytes_;
  const ReservedAddresses nowhere_;             // where the storages are while it is released
  mutable Mutex<LockRank::device_room> mutex_;  // of all below
  RoomStreams streams_;
  char* address_ = nullptr;  // of the memory, or nowhere
  at::Tensor memory_;        // [bytes], undefined while released
  std::vector<Lodger> lodgers_;
};

}  // namespace zx
