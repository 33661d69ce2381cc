// Work of our own in the midst of anybody's operators.
#pragma once

#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "params/read_guard.h"

namespace zx {

// While it lives, this thread's operators run below autograd, modes and transforms, and unseen by guards.
struct Unseen {
  ReadGuard::Pause pause;
  c10::InferenceMode normal{false};
  c10::impl::ForceDispatchKeyGuard plain{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::default_excluded_set};
};

// The same, on a stream.
struct UnseenOn : Unseen {
  explicit UnseenOn(c10::Stream stream) : guard(stream) {}
  c10::StreamGuard guard;
};

}  // namespace zx
