// Keeps what others may read of this rank, until they read nothing any more.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "peers/control_block.h"
#include "peers/failure_detector.h"
#include "peers/other_readers.h"

namespace zx {

// Note [Ranks linger]
// A rank reads others' state and parameters where they lie (Notes [State is pulled], [Shards are pulled]), and they
// take no part in that. So they can't know that they are needed. Rank 0 saves after its last step, when the others are
// through with their scripts: their optimizers are deleted, and their processes would end.
//
// So each rank says whether it may still read: OtherReaders, in a control block or by message. It may while a Reader
// lives, that of an optimizer or of sharded parameters, and until its script has come to its end. What it has itself
// lingers until no other rank may read it: keep() has what was deleted, and zerox/ranks/ends.py lets the process live
// on, for no longer than the group's timeout. Ranks that are gone, or gave up, read nothing.
//
// A rank whose script is at its end comes nowhere any more. Those who wait for it there must not wait for the timeout:
// FailureDetector::end() tells them.

class Linger {
 public:
  // `processes`: by rank, as far as they are known, else 0; `rank`: this one.
  Linger(const std::shared_ptr<FailureDetector>& failure_detector, std::vector<int64_t> processes, int rank);
  // Before any other call. This rank's control block is for OtherReaders that look into it.
  void set_readers(std::unique_ptr<OtherReaders> others) { others_ = std::move(others); }
  const std::shared_ptr<ControlBlock>& control_block() const { return own_; }
  Linger(const Linger&) = delete;
  Linger& operator=(const Linger&) = delete;

  // While one lives, this rank may read.
  class Reader {
   public:
    explicit Reader(std::shared_ptr<Linger> linger) : linger_(std::move(linger)) { linger_->others_->count_reader(1); }
    ~Reader() { linger_->others_->count_reader(-1); }
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

   private:
    std::shared_ptr<Linger> linger_;
  };

  // The other ranks that may read. Any thread may ask.
  std::vector<int> readers() const;
  // Whether a rank's script has come to its end: nothing of it changes any more. Never throws.
  bool has_ended(int rank) const { return others_->has_ended(rank); }

  // Keeps it until readers() are none; a thread looks. Never throws.
  static void keep(std::shared_ptr<const Linger> linger, std::shared_ptr<const void> what);

  // ---- at the end of this rank's script

  // Of this process: those that live, of which it is told.
  static void list(const std::shared_ptr<Linger>& made);
  static std::vector<std::shared_ptr<Linger>> all();
  // What is kept stays for ever. Not to be called with the GIL.
  static void free_no_more();
  // Calls what waits for it, as long as its `owner` lives: this process comes nowhere any more.
  static void come_no_more();
  static void before_end(std::weak_ptr<const void> owner, std::function<void()> tell);
  void end() { others_->say_end(); }
  // Ends waits for this rank, which will not come.
  void end_waits() const;
  // Another rank, or this one, has said that it is over.
  bool has_given_up() const { return (*own_)[ControlBlock::status] == ControlBlock::kGaveUp; }
  int rank() const { return rank_; }
  const std::vector<int64_t>& processes() const { return processes_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  const std::weak_ptr<FailureDetector> failure_detector_;
  const std::vector<int64_t> processes_;
  const int rank_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<ControlBlock> own_;
  std::unique_ptr<OtherReaders> others_{};
};

}  // namespace zx
