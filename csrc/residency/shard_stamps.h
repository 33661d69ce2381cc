// The stamps beside a rank's shard, which say of which step it is: see Note [Shards are pulled].
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace zx {

enum class ShardStamp : uint8_t { version, written, stored, came, left };
// Of `written`: this rank writes nothing, and is about to take rank 0's values.
constexpr int64_t kStandsBy = int64_t{1} << 60;
// Of `version`: the bucket has no values yet, nor has the shard; and it never will have them.
constexpr int64_t kNotFilled = -1;
constexpr int64_t kNeverFilled = -2;
constexpr size_t kShardStamps = 5;

// Other ranks read them, in this rank's memory or by message.
struct SharedStamps {
  std::atomic<int64_t> of[kShardStamps] = {0, 0, 0, 0, 0};

  std::atomic<int64_t>& at(ShardStamp stamp) { return of[static_cast<size_t>(stamp)]; }
  int64_t get(ShardStamp stamp) const { return of[static_cast<size_t>(stamp)].load(std::memory_order_acquire); }
};

}  // namespace zx
