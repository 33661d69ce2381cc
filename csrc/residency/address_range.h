// Memory that comes and goes, at addresses that never change.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "locks.h"
#include "residency/asked_storages.h"
#include "residency/room.h"

namespace zx {

// Note [Addresses that never change]
// While a bucket's parameters are released, their memory is used for other buckets. Their addresses are not: a range of
// addresses belongs to a bucket for life. So parameters, views, tensors that autograd saved, compiled code and numpy
// arrays stay valid, and nothing has to be set anew when the bucket comes back.
//
// On Linux mremap(2) moves pages from one address to another without copying them. Pages that a bucket gives up are
// kept as spare ones, since the system takes three times as long to make new ones (they are zeroed) as a bucket takes
// to be filled. They are moved in chunks of the size of a large page; what is left of a range is made anew each time.
//
// A released range can be neither read nor written: a read that nothing announces never finds another bucket's values.
// Nor does it find a part of its own: memory is filled at other addresses, and pages move to theirs when all is there.
// (A copy that is out of date is filled in its place, and so are the rows of a table that a lookup names.)

// Chunks of memory that no range uses. Any thread may call any of these.
class SparePages {
 public:
  static constexpr size_t kChunkBytes = size_t{2} << 20;

  SparePages() = default;
  ~SparePages();
  SparePages(const SparePages&) = delete;
  SparePages& operator=(const SparePages&) = delete;

  // Moves the chunk at `from` here. False if the system can't.
  bool take(char* from);
  // Moves a chunk to `into`, where nothing may be read yet. False if there is none.
  bool give(char* into);
  // Frees chunks until at most `most` bytes are left.
  void trim(size_t most);
  size_t bytes() const;

 private:
  mutable Mutex<LockRank::spare_pages> mutex_;  // of all below
  std::vector<char*> full_;                     // addresses of chunks that have pages
  std::vector<char*> empty_;                    // and of others, for chunks to come
  std::vector<char*> reserved_;                 // starts of the regions that these addresses are in
};

// Addresses without memory.
class ReservedAddresses {
 public:
  explicit ReservedAddresses(size_t bytes);
  ~ReservedAddresses();
  ReservedAddresses(const ReservedAddresses&) = delete;
  ReservedAddresses& operator=(const ReservedAddresses&) = delete;

  char* data() const { return data_; }  // at a multiple of a chunk's size

 private:
  size_t bytes_;
  char* start_;
  char* data_;
};

// Any thread may call any of these; the caller sees to it that nobody reads meanwhile.
class AddressRange final : public Room, public std::enable_shared_from_this<AddressRange> {
 public:
  // Has no memory at first. Without `spare`, which moves whole chunks: a range of which parts may have memory, a page
  // at a time. It gives none up to others.
  static std::shared_ptr<AddressRange> make(size_t bytes, std::shared_ptr<SparePages> spare, HiddenReads hidden);
  ~AddressRange() override;
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  char* data() const { return reserved_.data(); }
  const char* address() const override { return data(); }

  size_t bytes() const override { return bytes_; }
  at::Tensor tensor(at::ScalarType dtype) override;
  at::Tensor with_own_storage(const at::Tensor& view) override;
  void release() override;
  void restore() override;
  void end_fetch() override;
  void clear() override;
  void let_write(bool may) override;
  void let_ask(bool may) override { asked_.let_ask(may); }
  void restore_in_child() override;
  Inbox inbox() override { return {.data = filled()}; }
  void take_in(const Inbox& /*inbox*/, const std::vector<ByteSpan>& /*spans*/) override {}
  void pull(const at::Tensor& mapped, size_t start) override;
  void await_pulls() override {}
  void spoil(const std::vector<BytePiece>& own) override;
  void take_shard(const at::Tensor& shard, const std::vector<BytePiece>& own) override;
  void store_shard(const at::Tensor& shard, const std::vector<BytePiece>& own) override;
  at::Tensor served(const at::Tensor& shard) const override { return shard; }
  void serve(const at::Tensor& /*shard*/, const at::Tensor& /*served*/, const at::Tensor& /*rows*/) override {}
  void begin_use() override {}
  void end_use() override {}
  uint64_t digest() override;

  // Its memory comes from there now, and goes there. To be called while it has none.
  void move_to(std::shared_ptr<SparePages> spare) { spare_ = std::move(spare); }
  // Of a range of which parts have memory: that so many bytes of it are in use, until it is released; and that nobody
  // may read it until let_write() or end_fetch().
  void count_more(size_t bytes);
  void hide();

  // Bytes that all ranges and spare chunks of this process have now, and the most since the last call.
  static int64_t bytes_in_use();
  static int64_t most_in_use();

 private:
  AddressRange(size_t bytes, std::shared_ptr<SparePages> spare, HiddenReads hidden);
  void allow(int how);
  char* filled() const { return is_apart_ ? apart_.data() : data(); }

  size_t bytes_;
  size_t reserved_bytes_;  // of whole pages
  ReservedAddresses reserved_;
  ReservedAddresses apart_;  // where its memory is filled
  bool is_apart_ = false;
  size_t counted_ = 0;       // of these, in use
  size_t used_before_ = 0;   // from the start, in pages that restore() took from others
  bool has_memory_ = false;  // all of it
  std::shared_ptr<SparePages> spare_;
  AskedStorages asked_;
};

// Whether this system has what ranges need.
bool has_address_ranges();

}  // namespace zx
