#include "residency/address_range.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "params/own_storage.h"
#include "residency/digest.h"
#include "residency/faults.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#endif

namespace zx {
namespace {

[[maybe_unused]] constexpr size_t kChunk = SparePages::kChunkBytes;
[[maybe_unused]] constexpr size_t kChunksAtOnce = 32;  // are reserved

std::atomic<int64_t> in_use{0};
std::atomic<int64_t> most{0};

[[maybe_unused]] void count(int64_t bytes) {
  const int64_t now = in_use.fetch_add(bytes) + bytes;
  int64_t before = most;
  while (before < now && !most.compare_exchange_weak(before, now)) {
  }
}

#ifdef __linux__

char* aligned(char* address) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(address) + kChunk - 1) / kChunk * kChunk);
}

// `bytes` of addresses and, before them, what is needed to start at a multiple of a chunk. No memory.
char* reserve(size_t bytes) {
  void* made = mmap(nullptr, bytes + kChunk, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(made != MAP_FAILED, "zerox: no addresses for ", bytes, " bytes of parameters: ", std::strerror(errno));
  return static_cast<char*>(made);
}

size_t of_whole_pages(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::max<size_t>(1, (bytes + page - 1) / page) * page;
}

// Moves pages of a chunk, or of less. The addresses that they leave stay reserved.
bool move(char* from, char* to, size_t bytes = kChunk) {
  return mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) == to;
}

void drop(char* start, size_t bytes) { (void)madvise(start, bytes, MADV_DONTNEED); }

void protect(char* start, size_t bytes, int how) {
  TORCH_CHECK(mprotect(start, bytes, how) == 0, "zerox: the system refuses to change ", bytes,
              " bytes of parameters' memory: ", std::strerror(errno));
}

#endif

}  // namespace

#ifdef __linux__

bool has_address_ranges() { return true; }

SparePages::~SparePages() {
  count(-static_cast<int64_t>(full_.size() * kChunk));
  for (char* start : reserved_) munmap(start, (kChunksAtOnce + 1) * kChunk);
}

bool SparePages::take(char* from) {
  const std::lock_guard lock(mutex_);
  if (empty_.empty()) {
    reserved_.push_back(reserve(kChunksAtOnce * kChunk));
    for (size_t i = 0; i < kChunksAtOnce; ++i) empty_.push_back(aligned(reserved_.back()) + i * kChunk);
  }
  if (!move(from, empty_.back())) return false;
  full_.push_back(empty_.back());
  empty_.pop_back();
  return true;
}

bool SparePages::give(char* into) {
  const std::lock_guard lock(mutex_);
  if (full_.empty() || !move(full_.back(), into)) return false;
  empty_.push_back(full_.back());
  full_.pop_back();
  return true;
}

void SparePages::trim(size_t bytes) {
  const std::lock_guard lock(mutex_);
  while (full_.size() * kChunk > bytes) {
    drop(full_.back(), kChunk);
    count(-static_cast<int64_t>(kChunk));
    empty_.push_back(full_.back());
    full_.pop_back();
  }
}

size_t SparePages::bytes() const {
  const std::lock_guard lock(mutex_);
  return full_.size() * kChunk;
}

ReservedAddresses::ReservedAddresses(size_t bytes) : bytes_(bytes), start_(reserve(bytes)), data_(aligned(start_)) {}

ReservedAddresses::~ReservedAddresses() { munmap(start_, bytes_ + kChunk); }

AddressRange::AddressRange(size_t bytes, std::shared_ptr<SparePages> spare, HiddenReads hidden)
    : bytes_(bytes),
      reserved_bytes_(of_whole_pages(bytes)),
      reserved_(reserved_bytes_),
      apart_(reserved_bytes_),
      spare_(std::move(spare)),
      asked_(hidden) {
  for (char* start : {data(), apart_.data()}) {
    (void)madvise(start, reserved_bytes_ / kChunk * kChunk, spare_ == nullptr ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
  }
}

AddressRange::~AddressRange() { count(-static_cast<int64_t>(counted_)); }

void AddressRange::release() {
  has_memory_ = false;
  keep_fault_handler();
  // First, so that a reader that nothing announced finds either the values or a fault.
  allow(PROT_NONE);
  size_t done = 0;
  while (spare_ != nullptr && done + kChunk <= reserved_bytes_ && spare_->take(data() + done)) done += kChunk;
  drop(data() + done, reserved_bytes_ - done);
  count(-static_cast<int64_t>(counted_ - done));
  counted_ = 0;
}

void AddressRange::restore() {
  keep_fault_handler();
  if (spare_ == nullptr && !asked_.reads_fault()) {  // rows of it may be looked up meanwhile, and can't fault
    has_memory_ = true;
    allow(PROT_READ | PROT_WRITE);
    count_more(reserved_bytes_ - counted_);
    return;
  }
  size_t done = 0;
  while (spare_ != nullptr && done + kChunk <= reserved_bytes_ && spare_->give(apart_.data() + done)) done += kChunk;
  protect(apart_.data(), reserved_bytes_, PROT_READ | PROT_WRITE);
  has_memory_ = is_apart_ = true;
  if (spare_ == nullptr) {  // parts of it may have memory
    allow(PROT_NONE);
    drop(data(), reserved_bytes_);
  }
  counted_ += done;
  used_before_ = done;
  count_more(reserved_bytes_ - counted_);
}

// The system's new pages are zero.
void AddressRange::clear() { std::memset(filled(), 0, std::min(used_before_, bytes_)); }

void AddressRange::end_fetch() {
  if (!is_apart_) return;
  for (size_t done = 0; done < reserved_bytes_; done += kChunk) {
    char* const from = apart_.data() + done;
    const size_t some = std::min(kChunk, reserved_bytes_ - done);
    if (move(from, data() + done, some)) continue;
    protect(data() + done, some, PROT_READ | PROT_WRITE);
    std::memcpy(data() + done, from, some);
    drop(from, some);
  }
  is_apart_ = false;
  let_ask(true);
}

void AddressRange::let_write(bool may) { allow(may ? PROT_READ | PROT_WRITE : PROT_READ); }

void AddressRange::hide() { allow(PROT_NONE); }

void AddressRange::allow(int how) {
  protect(data(), reserved_bytes_, how);
  let_ask(how != PROT_NONE);
}

void AddressRange::restore_in_child() {
  allow(PROT_READ | PROT_WRITE);
  std::memset(data(), 0xff, bytes_);
}

#else  // nothing calls these: see has_address_ranges()

bool has_address_ranges() { return false; }

SparePages::~SparePages() = default;
bool SparePages::take(char* /*from*/) { return false; }
bool SparePages::give(char* /*into*/) { return false; }
void SparePages::trim(size_t /*most*/) {}
size_t SparePages::bytes() const { return 0; }

ReservedAddresses::ReservedAddresses(size_t bytes) : bytes_(bytes), start_(nullptr), data_(nullptr) {
  TORCH_CHECK(false, "zerox: this system can't move pages between addresses");
}
ReservedAddresses::~ReservedAddresses() = default;
AddressRange::AddressRange(size_t bytes, std::shared_ptr<SparePages> spare, HiddenReads hidden)
    : bytes_(bytes),
      reserved_bytes_(bytes),
      reserved_(bytes),
      apart_(bytes),
      spare_(std::move(spare)),
      asked_(hidden) {}
AddressRange::~AddressRange() = default;
void AddressRange::release() {}
void AddressRange::restore() {}
void AddressRange::end_fetch() {}
void AddressRange::clear() {}
void AddressRange::let_write(bool /*may*/) {}
void AddressRange::hide() {}
void AddressRange::restore_in_child() {}

#endif

std::shared_ptr<AddressRange> AddressRange::make(size_t bytes, std::shared_ptr<SparePages> spare, HiddenReads hidden) {
  return std::shared_ptr<AddressRange>(new AddressRange(bytes, std::move(spare), hidden));
}

at::Tensor AddressRange::tensor(at::ScalarType dtype) {
  const auto numel = static_cast<int64_t>(bytes_ / c10::elementSize(dtype));
  auto* kept = new std::shared_ptr(leases().let(shared_from_this()));
  return at::from_blob(data(), {numel}, [kept](void* /*data*/) { delete kept; }, at::TensorOptions().dtype(dtype));
}

at::Tensor AddressRange::with_own_storage(const at::Tensor& view) {
  at::Tensor made = zx::with_own_storage(view);
  asked_.add(made);
  return made;
}

void AddressRange::take_shard(const at::Tensor& shard, const std::vector<BytePiece>& own) {
  const auto* from = static_cast<const char*>(shard.const_data_ptr());
  for (const BytePiece& each : own) std::memcpy(filled() + each.to, from + each.from, each.bytes);
}

void AddressRange::store_shard(const at::Tensor& shard, const std::vector<BytePiece>& own) {
  auto* to = static_cast<char*>(shard.mutable_data_ptr());
  for (const BytePiece& each : own) std::memcpy(to + each.from, data() + each.to, each.bytes);
}

void AddressRange::pull(const at::Tensor& /*mapped*/, size_t /*start*/) {
  TORCH_INTERNAL_ASSERT(false, "a host's shards are read by their addresses");
}

void AddressRange::spoil(const std::vector<BytePiece>& own) {
  if (!has_memory_) return;
  for (const ByteSpan& each : all_but(own)) std::memset(filled() + each.start, 0xff, each.stop - each.start);
}

void AddressRange::count_more(size_t bytes) {
  counted_ += bytes;
  count(static_cast<int64_t>(bytes));
}

uint64_t AddressRange::digest() { return zx::digest(data(), bytes_); }

int64_t AddressRange::bytes_in_use() { return in_use; }

int64_t AddressRange::most_in_use() { return most.exchange(in_use); }

}  // namespace zx
