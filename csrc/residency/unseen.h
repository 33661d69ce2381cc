// Work of our own in the midst of anybody's operators.
#pragma once

#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include "params/read_guard.h"
#include "torch_internals.h"

namespace zx {

// While it lives, this thread's operators run below autograd, modes and transforms, and unseen by guards.
struct Unseen {
  ReadGuard::Pause pause;
  c10::InferenceMode normal{false};
  internals::BelowAll plain;
};

// The same, on a stream.
struct UnseenOn : Unseen {
  explicit UnseenOn(c10::Stream stream) : guard(stream) {}
  c10::StreamGuard guard;
};

}  // namespace zx
