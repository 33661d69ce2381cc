// Which buckets are whole on this rank, which go when room is short, and which is fetched ahead.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "residency/read_script.h"
#include "residency/uses.h"

namespace zx {

// This rank's whole copy of a bucket, or of a table.
struct Copy {
  enum class State : uint8_t { released, arriving, resident };

  size_t bytes = 0;
  bool is_table = false;  // its rows are fetched by lookups, and never ahead
  State state = State::resident;
  bool is_stale = false;  // parts of it that other ranks own are older than the last write
  bool is_old = false;    // all of it is older than the last step()
  bool may_go = false;    // it could be fetched again
  size_t held = 0;        // bytes of memory
  uint64_t touched = 0;

  bool is_up_to_date() const { return state == State::resident && !is_stale && !is_old; }
  bool is_outdated() const { return is_stale || is_old; }
};

// Note [Resident buckets are a cache]
// When a bucket comes and the limit would be passed, those go that are needed latest (see Note [What is needed next]).
// Pinned ones stay: if an operator reads more than the limit at once, the limit is passed for as long as it runs.
// Buckets that come over a wire are fetched ahead, into the room that is left.

// Knows no torch and no memory, only integers. Not thread-safe.
class Cache {
 public:
  // `uses`: of the same buckets, which are added to it first.
  explicit Cache(const Uses& uses) : uses_(uses) {}

  // Appends a bucket, resident or released.
  void add(size_t bytes, bool is_table, Copy::State state = Copy::State::resident) {
    copies_.push_back({.bytes = bytes, .is_table = is_table, .state = state});
    touch(size() - 1);
    if (state == Copy::State::resident) hold(size() - 1, bytes);
  }
  // A released bucket is here no longer: nobody has to fetch it, and it takes no memory.
  void give_away(int64_t bucket) { copies_[bucket] = {.state = Copy::State::resident}; }
  int64_t size() const { return static_cast<int64_t>(copies_.size()); }
  Copy& operator[](int64_t bucket) { return copies_[bucket]; }
  const Copy& operator[](int64_t bucket) const { return copies_[bucket]; }

  // How much may be resident; no limit at first.
  void set_limit(size_t bytes) { limit_ = bytes; }
  size_t limit() const { return limit_; }

  // ---- reads

  void touch(int64_t bucket) { copies_[bucket].touched = ++clock_; }
  // It is read: returns whether that is another bucket than at the last call.
  bool note_read(int64_t bucket) { return script_.note(bucket); }

  // ---- bytes

  // More of its memory is in use.
  void hold(int64_t bucket, size_t bytes) {
    copies_[bucket].held += bytes;
    resident_bytes_ += bytes;
    most_bytes_ = std::max(most_bytes_, resident_bytes_);
  }
  size_t resident_bytes() const { return resident_bytes_; }
  // The most that were resident at a time since the last call.
  size_t take_most_bytes() { return std::exchange(most_bytes_, resident_bytes_); }
  // Whether the limit is passed with so many bytes more.
  bool is_full(size_t more) const { return resident_bytes_ + more > limit_; }
  // How much of spare memory is not too much, if `more` bytes are about to come, `reused` of them from it.
  size_t spare_bytes(size_t more, size_t reused) const {
    return limit_ - std::min(limit_, resident_bytes_ + more) + reused;
  }

  // ---- what goes

  bool may_be_released(int64_t bucket) const {
    const Copy& copy = copies_[bucket];
    const bool has_memory =
        copy.state == Copy::State::resident || (copy.state == Copy::State::released && copy.held > 0);
    return has_memory && copy.may_go && !uses_.is_pinned(bucket);
  }

  void note_release(int64_t bucket) {
    Copy& copy = copies_[bucket];
    copy.state = Copy::State::released;
    copy.is_stale = copy.is_old = false;
    resident_bytes_ -= std::exchange(copy.held, 0);
  }

  // What is to be released before `more` bytes come, so that all is within the limit if it can be: first what is needed
  // latest.
  std::vector<int64_t> victims(size_t more) const {
    std::vector<int64_t> chosen;
    if (!is_full(more)) return chosen;
    for (int64_t bucket = 0; bucket < size(); ++bucket) {
      if (may_be_released(bucket)) chosen.push_back(bucket);
    }
    const std::vector<int64_t> uses = script_.next_uses(copies_.size());
    std::sort(chosen.begin(), chosen.end(), [&](int64_t one, int64_t other) {
      return uses[one] != uses[other] ? uses[one] > uses[other] : copies_[one].touched < copies_[other].touched;
    });
    size_t left = resident_bytes_;
    size_t count = 0;
    while (count < chosen.size() && left + more > limit_) left -= copies_[chosen[count++]].held;
    chosen.resize(count);
    return chosen;
  }

  // ---- what comes

  bool fits_beside_pinned(size_t bytes) const {
    for (int64_t bucket = 0; bucket < size(); ++bucket) {
      if (copies_[bucket].state != Copy::State::released && !may_be_released(bucket)) bytes += copies_[bucket].bytes;
    }
    return bytes <= limit_;
  }

  // The released bucket that is needed first, if there is room for it, or would be without what is needed later; else
  // -1, also while a reader waits for another one.
  int64_t next_to_fetch_ahead() const {
    const std::vector<int64_t> uses = script_.next_uses(copies_.size());
    int64_t next = -1;
    for (int64_t bucket = 0; bucket < size(); ++bucket) {
      if (copies_[bucket].state != Copy::State::released || copies_[bucket].is_table) continue;
      if (uses_.is_pinned(bucket)) return -1;
      if (uses[bucket] == ReadScript::kNever) continue;
      if (next < 0 || uses[bucket] < uses[next]) next = bucket;
    }
    if (next < 0) return -1;
    size_t kept = copies_[next].bytes;
    for (int64_t bucket = 0; bucket < size(); ++bucket) {
      const bool stays = !may_be_released(bucket) || uses[bucket] < uses[next];
      if (copies_[bucket].state != Copy::State::released && stays) kept += copies_[bucket].bytes;
    }
    return kept <= limit_ ? next : -1;
  }

 private:
  const Uses& uses_;
  std::vector<Copy> copies_;  // by bucket
  ReadScript script_;
  size_t limit_ = std::numeric_limits<size_t>::max();
  size_t resident_bytes_ = 0;
  size_t most_bytes_ = 0;  // that were resident at a time, since take_most_bytes()
  uint64_t clock_ = 0;
};

}  // namespace zx
