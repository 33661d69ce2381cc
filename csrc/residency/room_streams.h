// The order of streams around the memory of an accelerator's room: see Note [Rooms on an accelerator].
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

namespace zx {

// Not thread-safe, but for what is const. The host waits in none of these.
class RoomStreams {
 public:
  explicit RoomStreams(c10::Stream fetches);

  c10::Stream fetches() const { return fetches_; }
  c10::Device device() const { return fetches_.device(); }

  // Around what reads or writes the room on the current stream, after all that has arrived.
  void begin_read();
  void end_read();
  // Another stream reads it until the room is released.
  void note_lasting(c10::Stream stream) { reader(stream).is_lasting = true; }

  // What the fetch stream does next comes after all reads; and no read is known any more, for the room is released.
  void await_readers();
  void forget_readers() { readers_.clear(); }
  // What the fetch stream has done is in the room, for reads to come.
  void note_arrival();
  std::shared_ptr<c10::Event> arrival() const { return arrival_; }

  // Other ranks' memory is copied from, until the last arrival after it is over: an event of its own, which the host
  // may wait for while others go on; null if it knows that it is over.
  void note_pull() { follows_pulls_ = true; }
  std::shared_ptr<c10::Event> last_pull() const { return follows_pulls_ ? arrival_ : nullptr; }
  void note_pulled(const std::shared_ptr<c10::Event>& last) { follows_pulls_ = follows_pulls_ && arrival_ != last; }

  // What the current stream has done so far, which the fetch stream waits for.
  c10::Event record_write() const;

 private:
  struct Reader {
    c10::Stream stream;
    c10::Event last;
    bool is_lasting = false;
  };

  c10::Stream current() const;
  c10::Event record(c10::Stream stream) const;
  Reader& reader(c10::Stream stream);

  const c10::Stream fetches_;
  std::shared_ptr<c10::Event> arrival_;
  std::vector<c10::Stream> waited_;  // streams that have waited for it
  bool follows_pulls_ = false;       // which the host has not waited for
  std::vector<Reader> readers_;
};

}  // namespace zx
