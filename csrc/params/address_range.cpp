#include "params/address_range.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

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

// Moves a chunk's pages. The addresses that they leave stay reserved.
bool move(char* from, char* to) {
  return mremap(from, kChunk, kChunk, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) == to;
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

AddressRange::AddressRange(size_t bytes, std::shared_ptr<SparePages> spare) : bytes_(bytes), spare_(std::move(spare)) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  reserved_bytes_ = std::max<size_t>(1, (bytes + page - 1) / page) * page;
  reserved_ = reserve(reserved_bytes_);
  data_ = aligned(reserved_);
  (void)madvise(data_, reserved_bytes_ / kChunk * kChunk, MADV_HUGEPAGE);
  protect(data_, reserved_bytes_, PROT_READ | PROT_WRITE);
  count(static_cast<int64_t>(reserved_bytes_));
}

AddressRange::~AddressRange() {
  if (has_memory_) count(-static_cast<int64_t>(reserved_bytes_));
  munmap(reserved_, reserved_bytes_ + kChunk);
}

void AddressRange::release() {
  has_memory_ = false;
  // First, so that a reader that nothing announced finds either the values or a fault.
  protect(data_, reserved_bytes_, PROT_NONE);
  size_t done = 0;
  while (done + kChunk <= reserved_bytes_ && spare_->take(data_ + done)) done += kChunk;
  drop(data_ + done, reserved_bytes_ - done);
  count(-static_cast<int64_t>(reserved_bytes_ - done));
}

void AddressRange::restore() {
  has_memory_ = true;
  size_t done = 0;
  while (done + kChunk <= reserved_bytes_ && spare_->give(data_ + done)) done += kChunk;
  protect(data_, reserved_bytes_, PROT_READ | PROT_WRITE);
  count(static_cast<int64_t>(reserved_bytes_ - done));
}

void AddressRange::let_write(bool may) { protect(data_, reserved_bytes_, may ? PROT_READ | PROT_WRITE : PROT_READ); }

void AddressRange::restore_in_child() { protect(data_, reserved_bytes_, PROT_READ | PROT_WRITE); }

#else  // nothing calls these: see has_address_ranges()

bool has_address_ranges() { return false; }

SparePages::~SparePages() = default;
bool SparePages::take(char* /*from*/) { return false; }
bool SparePages::give(char* /*into*/) { return false; }
void SparePages::trim(size_t /*most*/) {}
size_t SparePages::bytes() const { return 0; }

AddressRange::AddressRange(size_t bytes, std::shared_ptr<SparePages> spare) : bytes_(bytes), spare_(std::move(spare)) {
  TORCH_CHECK(false, "zerox: this system can't move pages between addresses");
}
AddressRange::~AddressRange() = default;
void AddressRange::release() {}
void AddressRange::restore() {}
void AddressRange::let_write(bool /*may*/) {}
void AddressRange::restore_in_child() {}

#endif

at::Tensor AddressRange::tensor(const std::shared_ptr<AddressRange>& range, at::ScalarType dtype) {
  const auto numel = static_cast<int64_t>(range->bytes_ / c10::elementSize(dtype));
  auto* kept = new std::shared_ptr<AddressRange>(range);
  return at::from_blob(
      range->data_, {numel}, [kept](void* /*data*/) { delete kept; }, at::TensorOptions().dtype(dtype));
}

int64_t AddressRange::bytes_in_use() { return in_use; }

int64_t AddressRange::most_in_use() { return most.exchange(in_use); }

}  // namespace zx
