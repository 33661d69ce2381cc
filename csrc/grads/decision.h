// Whether a backward is sent, where a wrapper's forward decides.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace zx {

// Note [Forward decides]
// Without a wrapper a backward is sent unless it runs inside no_sync(). With DistributedDataParallel what counts is
// where its forward ran: a backward is sent if any forward since the last one that was sent ran outside no_sync(),
// whatever came after it. A wrapper shares one decision with the slots of all its parameters, whoever updates them, so
// that each wrapper decides for its own.
//
// Where no forward of the wrapper has said anything, gradients are sent: of a second backward of one forward, or of a
// forward past the wrapper. So no sync point asks a decision, and one that is never used hinders none.

// Note [Several gradients in one backward]
// A reentrant checkpoint runs a backward inside a backward. So a parameter of two of them gets two gradients, and which
// is the last one nobody can tell. A wrapper with static_graph=True says that each backward has the same ones. Then the
// first backward counts them, and later ones send a gradient when all of it is there. What leaves too early in the
// first one must not be harmed: where p.grad is sent from where it lies (ZeRO stage 1), all of it stays until the
// backward ends. Where it is taken away when it leaves, what comes later leaves in one more round, as in a backward of
// its own. Without the wrapper's word a second gradient is refused.

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
  // See Note [Several gradients in one backward].
  void set_static(bool is_static) { is_static_ = is_static; }
  bool is_static() const { return is_static_; }

 private:
  enum class Said : uint8_t { nothing, send, keep };
  std::atomic<Said> said_ = Said::nothing;
  std::atomic<bool> is_static_ = false;
};

inline bool is_static(const std::shared_ptr<Decision>& decision) {
  return decision != nullptr && decision->is_static();
}

}  // namespace zx
