// The memory that a bucket's parameters have while they are whole (ZeRO stage 3).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "peers/neighbours.h"
#include "residency/lease.h"

namespace zx {

// Note [Rooms]
// Parameters keep their storages for life, released or not: views, and what autograd saved, refer to them. On a host
// memory comes and goes at addresses that never change (Note [Addresses that never change]). An accelerator has its
// order of streams to keep, and there the storages are moved to other memory (Note [Rooms on an accelerator]).
//
// BucketCopies and Fetcher say when, and that nobody reads meanwhile.

// Rows of a table: where each is among the rows that are read, and among those of the table.
struct RowMoves {
  std::vector<int64_t> from;
  std::vector<int64_t> to;
};

class Room {
 public:
  virtual ~Room() = default;

  virtual size_t bytes() const = 0;
  // Where its tensors lie now, and whether this is among it.
  virtual const char* address() const = 0;
  bool has(const void* place) const {
    const char* const start = address();
    return place >= start && place < start + bytes();
  }
  // What its tensors keep alive: see Note [A model outlives its optimizer].
  Leases& leases() { return leases_; }
  // [bytes / element] of it; keeps it alive.
  virtual at::Tensor tensor(at::ScalarType dtype) = 0;
  // The elements of a view of that tensor, in a storage of their own that keeps the room alive: see
  // Note [Every parameter has a storage of its own].
  virtual at::Tensor with_own_storage(const at::Tensor& view) = 0;

  // Takes its memory away.
  virtual void release() = 0;
  // Gives it memory, with whatever is in it, for a fetch. When that is over, all may be read.
  virtual void restore() = 0;
  virtual void end_fetch() {}
  // In between: all of it becomes zero.
  virtual void clear() = 0;
  // Whether it may be written; it may after end_fetch(). A write where it may not is a fault, if the system can tell.
  virtual void let_write(bool may) = 0;
  // Whether tensors that lie here may be asked for their addresses, if hidden reads are to raise. They may as soon as
  // the memory may be read, and are not to when nobody uses it any more. See HiddenReads.
  virtual void let_ask(bool /*may*/) {}
  // Gives it memory full of NaN in a forked child, where other threads' locks may be held for ever.
  virtual void restore_in_child() = 0;

  // Some of its bytes.
  struct ByteSpan {
    size_t start;
    size_t stop;
  };

  // Where others' shards are to be put, at their places among `bytes` of the host, and `memory`, which keeps those;
  // then which are there.
  struct Inbox {
    char* data = nullptr;
    at::Tensor memory{};
  };
  virtual Inbox inbox() = 0;
  virtual void take_in(const Inbox& inbox, const std::vector<ByteSpan>& spans) = 0;

  // Copies another rank's shard, which lies in its device's memory, to `start`; and the host waits until no memory of
  // others is read any more. See Note [Shards in a device's memory].
  virtual void pull(const at::Tensor& mapped, size_t start) = 0;
  virtual void await_pulls() = 0;
  // The host waits until its device has done all that fetches have asked of it, this rank's shard read too.
  virtual void await_arrival() {}

  // NaN in every dtype, in all but this rank's own shard: `own`, in ascending order. Nothing if it has no memory.
  virtual void spoil(const std::vector<BytePiece>& own) = 0;

  // Copies pieces of this rank's shard into their places, or back.
  virtual void take_shard(const at::Tensor& shard, const std::vector<BytePiece>& own) = 0;
  virtual void store_shard(const at::Tensor& shard, const std::vector<BytePiece>& own) = 0;

  // The shard as others read it in the host's memory: the same tensor, or a copy that serve() makes anew.
  virtual at::Tensor served(const at::Tensor& shard) const = 0;
  // The shard was written on the current stream, and others read it from now on. `served` may be undefined. `rows`:
  // int64, all that was written of it, by place; undefined if any of it may have been.
  virtual void serve(const at::Tensor& shard, const at::Tensor& served, const at::Tensor& rows) = 0;

  // Around what reads or writes it, or its shard in step(), on the current stream.
  virtual void begin_use() = 0;
  virtual void end_use() = 0;

  virtual uint64_t digest() = 0;

  // What BucketCopies knows it by.
  int64_t index() const { return index_; }
  void set_index(int64_t index) { index_ = index; }

 protected:
  // What lies between these pieces, and around them.
  std::vector<ByteSpan> all_but(const std::vector<BytePiece>& own) const {
    std::vector<ByteSpan> found;
    size_t start = 0;
    for (const BytePiece& piece : own) {
      found.push_back({start, piece.to});
      start = piece.to + piece.bytes;
    }
    found.push_back({start, bytes()});
    return found;
  }

 private:
  int64_t index_ = -1;
  Leases leases_;
};

}  // namespace zx
