// Whether a backward is sent, where a wrapper's forward decides.
#pragma once

#include <atomic>
#include <cstdint>

namespace zx {

// Note [Forward decides]
// Without a wrapper a backward is sent unless it runs inside no_sync(). With DistributedDataParallel what counts is
// where its forward ran: a backward is sent if any forward since the last one that was sent ran outside no_sync(),
// whatever came after it. A wrapper shares one decision with the slots of all its parameters, whoever updates them, so
// that each wrapper decides for its own.
//
// Where no forward of the wrapper has said anything, gradients are sent: of a second backward of one forward, or of a
// forward past the wrapper. So no meeting asks a decision, and one that is never used hinders none.

// Any thread may call any of these.
class Decision {
 public:
  void note_forward(bool syncs) {
    if (syncs) {
      said_ = Said::send;
    } else {
      Said nothing = Said::nothing;
      said_.compare_exchange_strong(nothing, Said::keep);
    }
  }
  // A backward of some of its gradients was sent.
  void note_sent() { said_ = Said::nothing; }
  // Whether gradients stay here.
  bool keeps() const { return said_ == Said::keep; }

 private:
  enum class Said : uint8_t { nothing, send, keep };
  std::atomic<Said> said_ = Said::nothing;
};

}  // namespace zx
