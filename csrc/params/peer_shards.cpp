#include "params/peer_shards.h"

#include <algorithm>
#include <stdexcept>
#include <thread>

namespace zx {
namespace {

using std::chrono::microseconds;

// A rank is late by a few of these at most, if all have cores of their own.
constexpr int kYields = 64;
constexpr microseconds kFirstPause{20};
constexpr microseconds kLongestPause{1000};

}  // namespace

int64_t PeerShards::read_word(int rank, const ShardPlace& place, ShardWord word) const {
  int64_t value = 0;
  neighbours_.read(rank, place.words + static_cast<size_t>(word) * sizeof(value), &value, sizeof(value));
  return value;
}

void PeerShards::await(int rank, const ShardPlace& place, ShardWord word, int64_t value) const {
  whereabouts_->needing(rank, [&] {
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    microseconds pause = kFirstPause;
    // Read twice: the system need not copy eight bytes at once.
    const auto is_there = [&] {
      return read_word(rank, place, word) >= value && read_word(rank, place, word) >= value;
    };
    for (int64_t tries = 0; !is_there(); ++tries) {
      if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("timed out");
      if (tries < kYields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(pause);
        pause = std::min(2 * pause, kLongestPause);
      }
    }
  });
  std::atomic_thread_fence(std::memory_order_seq_cst);  // what the word stands for is read after it
}

bool PeerShards::has_left(int rank, const ShardPlace& place) const {
  try {
    return read_word(rank, place, ShardWord::left) != 0;
  } catch (const std::exception&) {
    return true;
  }
}

void PeerShards::read(int rank, const ShardPlace& place, void* into, size_t bytes) const {
  whereabouts_->needing(rank, [&] { neighbours_.read(rank, place.shard, into, bytes); });
}

}  // namespace zx
