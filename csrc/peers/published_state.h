// An optimizer's state on this rank, which others read where it lies.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "locks.h"
#include "peers/control_block.h"

namespace zx {

// Note [State is pulled]
// Each rank has the state of its own shards. A rank that saves it alone (`if rank == 0`) reads the rest from its
// owners, in their memory (Note [Neighbours]) or by message (Note [Questions]). Their scripts take no part: they may be
// in a backward, or wait for this rank in step().
//
// State changes in step() and in a few other calls, on all ranks alike. So each rank counts these changes: the version
// of its state. A step() begins a new round of versions, so that ranks have the same one again if a few loaded a state
// meanwhile, and the others did not. In a rank's control block stands a stamp: the version, how many other changes
// there were, which a rank makes alone, whether the state is being changed now, and whether a change has broken off. A
// reader wants the state of one version. It waits until the owner has come to it, copies, and looks at the stamp again:
// if it is another one, what was copied may be a mixture, and is discarded. An owner that has gone on has nothing of
// the older version any more. All that a reader copies of one version has one stamp, that of the owner's directory.
//
// In step() no owner changes anything before all ranks have synchronized there, and a rank waits before that until
// nobody in it pulls: PeerStates::await_pulls(). So a thread that saves beside the training can't be overtaken in the
// middle of a tensor.
//
// Where the state lies an owner says in a directory of addresses. It is replaced only while the state is being changed,
// and kept, since a reader may still look. After the deletion of the optimizer the state lingers for the others: Note
// [Ranks linger].
//
// Nothing waits for a reader but its own rank, so one that can't read gives up nothing: it raises.

// Between a copy and the look at the stamp after it. The thread sanitizer knows no fences, and sees nothing of what the
// system copies.
inline void fence_of_copies() {
#ifndef __SANITIZE_THREAD__
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

// The later ones count more, if one is inside of another.
enum class StateChange : uint8_t { of_this_rank, of_all, load, step };

class StateStamp {
 public:
  static constexpr int64_t kRound = 1024;  // versions from one step() to the next, if so much else does not happen

  StateStamp() = default;
  bool operator==(const StateStamp&) const = default;
  explicit StateStamp(int64_t word) : word_(word) {}
  StateStamp(int64_t version, int64_t own_changes, bool is_changing, bool is_broken)
      : word_((version << kOwnBits) | ((own_changes << kFlags) & ((int64_t{1} << kOwnBits) - 1)) |
              (is_changing ? kChanging : 0) | (is_broken ? kBroken : 0)) {}
  // Of state that is no more.
  static StateStamp gone() { return StateStamp(INT64_MAX - kChanging - kBroken); }

  int64_t word() const { return word_; }
  int64_t version() const { return word_ >> kOwnBits; }
  bool is_changing() const { return (word_ & kChanging) != 0; }
  bool is_broken() const { return (word_ & kBroken) != 0; }

 private:
  static constexpr int kVersionBits = 40;
  static constexpr int kOwnBits = 63 - kVersionBits;
  static constexpr int64_t kChanging = 1;
  static constexpr int64_t kBroken = 2;
  static constexpr int kFlags = 2;

  int64_t word_ = 0;
};

// Mostly by the optimizer's caller, but any thread may.
class PublishedState {
 public:
  // Of a control block, whose address() others know.
  enum Word : size_t { stamp = ControlBlock::first_free, directory, length, num_words };

  PublishedState() : block_(std::make_shared<ControlBlock>(num_words)) {}
  // Others find that it is gone.
  ~PublishedState();
  PublishedState(const PublishedState&) = delete;
  PublishedState& operator=(const PublishedState&) = delete;

  uint64_t address() const { return block_->address(); }
  int64_t version() const { return version_; }
  bool is_changed_by_this_thread() const { return changing_.load() == std::this_thread::get_id(); }

  // Where the state lies, which may change though it is in the same places: share_memory_() moves tensors.
  class Places {
   public:
    virtual ~Places() = default;
    virtual size_t count() const = 0;
    virtual std::vector<int64_t> addresses() const = 0;
    // Copies bytes of a place, into the host's memory; `follows_caller`: behind what this thread has had a device do.
    // May wait for a device, and may throw.
    virtual void read(size_t place, size_t start, void* into, size_t bytes, bool follows_caller) const = 0;
    // The current thread has changed what lies there, or had a device do so that is still at it.
    virtual void note_change() = 0;
    // What this thread has a device do next comes after that.
    virtual void follow_change() const = 0;
  };

  // Around a change, which may have others inside, or beside it. `is_whole`: false if it broke off, which only a load
  // mends. `places`: in which the state lies from now on; null: as before.
  void begin_change();
  void end_change(StateChange what, bool is_whole, std::shared_ptr<Places> places = {});

  // For threads of this process, as StateReader's for other ranks. `follows_caller` sees what a script has written into
  // the state itself. A thread that answers others must not follow anything but changes: what its device does next may
  // wait for them.
  StateStamp now() const { return StateStamp((*block_)[stamp]); }
  size_t num_places() const;
  bool read(StateStamp stamp, size_t place, size_t start, void* into, size_t bytes, bool follows_caller = false) const;
  void follow_change() const;

  // One that breaks off unless it comes to done().
  class Change {
   public:
    Change(PublishedState& state, StateChange what) : state_(state), what_(what) { state_.begin_change(); }
    ~Change() { state_.end_change(what_, is_whole_); }
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;
    void done() { is_whole_ = true; }

   private:
    PublishedState& state_;
    const StateChange what_;
    bool is_whole_ = false;
  };

 private:
  void set_stamp(bool is_changing);
  void publish_addresses();

  std::shared_ptr<ControlBlock> block_;
  std::atomic<int64_t> version_ = 0;
  std::atomic<std::thread::id> changing_{};         // the thread that changes it now
  mutable Mutex<LockRank::published_state> mutex_;  // of all below, and of who changes these
  int64_t num_changes_ = 0;
  int depth_ = 0;                                      // of begin_change()
  StateChange strongest_ = StateChange::of_this_rank;  // since the outermost one
  bool is_broken_ = false;
  std::shared_ptr<Places> places_{};
  std::deque<std::vector<int64_t>> directories_{};  // the last one holds
};

}  // namespace zx
