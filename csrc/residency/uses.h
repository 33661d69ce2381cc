// Who uses the buckets of sharded parameters: operators, lookups, collectives, and whole().
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

namespace zx {

// Why a bucket is pinned beside operators: it was `lent` to a collective, and may be written until the next step(); or
// it is `kept` since it was written here while another rank stood by; or it was written `here_only`, until ranks
// synchronize.
enum class Stays : uint8_t { no, lent, kept, here_only };

// How often each bucket is pinned, and by whom. Buckets are added in order. Knows no torch, and is not thread-safe, but
// for what it remembers of the calling thread.
class Uses {
 public:
  void add() { counts_.push_back({.pins = whole_}); }

  // A pinned bucket stays where it is.
  void pin(int64_t bucket) { ++counts_[bucket].pins; }
  void unpin(int64_t bucket) { --counts_[bucket].pins; }
  bool is_pinned(int64_t bucket) const { return counts_[bucket].pins > 0; }

  // A thread that has pinned a bucket waits for it, and does not read it meanwhile.
  void begin_wait(int64_t bucket) { ++counts_[bucket].waiting; }
  void end_wait(int64_t bucket) { --counts_[bucket].waiting; }

  // Whether anybody reads the bucket. whole() pins all of them, and does not count as a reader.
  bool is_read(int64_t bucket) const { return num_readers(bucket) > whole_; }
  // Whether anybody but the caller does, who is a reader; and whether anybody but the caller has pinned it to read.
  bool is_read_by_another(int64_t bucket) const { return num_readers(bucket) > whole_ + 1; }
  bool is_used_by_another(int64_t bucket) const { return num_readers(bucket) > 1; }

  // Of a bucket that is pinned: an operator may write it. They return whether that is the first, and was the last.
  bool begin_write(int64_t bucket) { return counts_[bucket].writers++ == 0; }
  bool end_write(int64_t bucket) { return --counts_[bucket].writers == 0; }
  // Whether the bucket's memory may be written, by an operator or inside whole().
  bool may_be_written(int64_t bucket) const { return counts_[bucket].writers > 0 || is_whole(); }

  // Of whole(), which pins all buckets, each by a pin() of its own. Calls may be inside others. enter_whole() returns
  // whether it is the outermost.
  bool enter_whole() { return whole_++ == 0; }
  void leave_whole() { --whole_; }
  bool is_whole() const { return whole_ > 0; }

  // ---- beside operators

  Stays stays(int64_t bucket) const { return counts_[bucket].stays; }
  // Pins the bucket until let_go(). What is lent may be written: returns whether that is the first write.
  bool lend(int64_t bucket) {
    stay(bucket, Stays::lent);
    return begin_write(bucket);
  }
  void keep(int64_t bucket, Stays why) { stay(bucket, why); }
  // Returns whether it had stayed for that reason.
  bool let_go(int64_t bucket, Stays why) {
    Count& count = counts_[bucket];
    if (count.stays != why) return false;
    count.stays = Stays::no;
    --count.pins;
    if (why == Stays::lent) --count.writers;
    return true;
  }

  // ---- by this thread, without a lock

  // What the operators use that this thread is in. A lookup of rows is noted as lookup_of().
  void note_here(int64_t what) const { here().emplace_back(this, what); }
  void forget_here(int64_t what) const {
    auto& all = here();
    const auto found = std::find(all.rbegin(), all.rend(), std::pair(this, what));
    if (found != all.rend()) all.erase(std::next(found).base());
  }
  bool is_used_here(int64_t what) const {
    return std::find(here().begin(), here().end(), std::pair(this, what)) != here().end();
  }

  static int64_t lookup_of(int64_t bucket) { return ~bucket; }
  static bool is_lookup(int64_t what) { return what < 0; }
  static int64_t bucket_of(int64_t what) { return is_lookup(what) ? ~what : what; }

 private:
  struct Count {
    int64_t pins = 0;
    int64_t waiting = 0;  // among the pins: those of threads that do not read yet
    int64_t writers = 0;  // among the pins: those of operators that may write
    Stays stays = Stays::no;
  };

  int64_t num_readers(int64_t bucket) const { return counts_[bucket].pins - counts_[bucket].waiting; }

  void stay(int64_t bucket, Stays why) {
    ++counts_[bucket].pins;
    counts_[bucket].stays = why;
  }

  static std::vector<std::pair<const Uses*, int64_t>>& here() {
    static thread_local std::vector<std::pair<const Uses*, int64_t>> all;
    return all;
  }

  std::vector<Count> counts_;
  int64_t whole_ = 0;  // how many whole() are open
};

}  // namespace zx
