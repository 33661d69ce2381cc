// The numbers beside a rank's shard, which say of which step it is: see Note [Shards are pulled].
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace zx {

enum class ShardWord : uint8_t { version, written, stored, left };
constexpr size_t kShardWords = 4;

// Other ranks read them, in this rank's memory or by message.
struct SharedWords {
  std::atomic<int64_t> of[kShardWords] = {0, 0, 0, 0};

  std::atomic<int64_t>& at(ShardWord word) { return of[static_cast<size_t>(word)]; }
  int64_t get(ShardWord word) const { return of[static_cast<size_t>(word)].load(std::memory_order_acquire); }
};

}  // namespace zx
