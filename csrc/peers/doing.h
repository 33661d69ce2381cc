// What a thread is doing, in the user's words, for errors and for what is said of long waits.
#pragma once

#include <functional>
#include <string>

namespace zx {

// As long as the object lives, this thread is doing what `text` says, unless it was doing something before: the
// outermost call is the one that the user made. Other threads call `text` while this one waits.
class Doing {
 public:
  using Text = std::function<std::string()>;

  // `per_batch`: a training loop does it for each batch, so a rank with fewer batches may be why another one waits.
  explicit Doing(Text text, bool per_batch = false) : text_(std::move(text)), per_batch_(per_batch) {
    if (current_ == nullptr) current_ = this;
  }
  ~Doing() {
    if (current_ == this) current_ = nullptr;
  }
  Doing(const Doing&) = delete;

  static const Doing* current() { return current_; }  // null if it is nothing that anybody has named
  static std::string current_text() { return current_ == nullptr ? "" : current_->text_(); }

  std::string text() const { return text_(); }
  bool per_batch() const { return per_batch_; }

 private:
  static thread_local const Doing* current_;

  Text text_;
  bool per_batch_;
};

}  // namespace zx
