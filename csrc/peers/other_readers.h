// What ranks tell each other of themselves, for those that linger: see Note [Ranks linger].
#pragma once

namespace zx {

// Any thread may call any of these, and none throws.
class OtherReaders {
 public:
  OtherReaders() = default;
  virtual ~OtherReaders() = default;
  OtherReaders(const OtherReaders&) = delete;
  OtherReaders& operator=(const OtherReaders&) = delete;

  // This rank has one reader more, or less; and its script has come to its end.
  virtual void count_reader(int more) = 0;
  virtual void say_end() = 0;

  // Whether another rank may still read; one that is gone or gave up reads nothing.
  virtual bool may_read(int rank) const = 0;
  // Whether its script has come to its end: nothing of it changes any more.
  virtual bool has_ended(int rank) const = 0;
};

}  // namespace zx
