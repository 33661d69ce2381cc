#include "peers/state_reader.h"

#include <exception>
#include <future>
#include <system_error>

namespace zx {
namespace {

// From here on a second thread is worth its start. Most of the time goes into pages that this process did not have
// before, which two threads get almost twice as fast.
constexpr size_t kBytesOfTwo = 2 << 20;

void read_by_two(const Neighbours& neighbours, int rank, uint64_t address, char* into, size_t bytes) {
  const size_t half = bytes < kBytesOfTwo ? bytes : bytes / 2;
  const auto read_rest = [&] { neighbours.read(rank, address + half, into + half, bytes - half); };
  std::future<void> rest = std::async(std::launch::deferred, read_rest);
  try {
    if (half < bytes) rest = std::async(std::launch::async, read_rest);
  } catch (const std::system_error&) {
    // There is no thread to be had: this one reads it afterwards.
  }
  neighbours.read(rank, address, into, half);
  rest.get();
}

}  // namespace

int64_t StateReader::word(int rank, PublishedState::Word which) const {
  int64_t found = 0;
  neighbours_.read(rank, control_blocks_.at(rank) + ControlBlock::offset_of(which), &found, sizeof(found));
  return found;
}

std::optional<StateStamp> StateReader::stamp_since(int rank, int64_t version) const {
  const StateStamp found(word(rank, PublishedState::stamp));
  // Read twice: the system need not copy eight bytes at once.
  if (found.version() < version || found.is_changing() || !is_still(rank, found)) return std::nullopt;
  return found;
}

std::optional<std::vector<int64_t>> StateReader::addresses(int rank, StateStamp stamp) const {
  const int64_t length = word(rank, PublishedState::length);
  const int64_t directory = word(rank, PublishedState::directory);
  if (!is_still(rank, stamp)) return std::nullopt;
  std::vector<int64_t> found(static_cast<size_t>(length));
  neighbours_.read(rank, static_cast<uint64_t>(directory), found.data(), found.size() * sizeof(int64_t));
  fence_of_copies();
  return is_still(rank, stamp) ? std::optional(std::move(found)) : std::nullopt;
}

bool StateReader::read(int rank, StateStamp stamp, uint64_t address, void* into, size_t bytes) const {
  if (!is_still(rank, stamp)) return false;
  fence_of_copies();
  try {
    read_by_two(neighbours_, rank, address, static_cast<char*>(into), bytes);
  } catch (const std::exception&) {
    if (is_still(rank, stamp)) throw;  // else it may have freed what it had there
    return false;
  }
  fence_of_copies();
  return is_still(rank, stamp);
}

}  // namespace zx
