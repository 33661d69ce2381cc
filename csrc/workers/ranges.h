// The ranges that profilers show of a bucket: one for each thing that happens to it, in the order of these things.
//
//   launch        autograd's thread   its last gradient is ready and its turn has come: gradients are taken
//   pack          pack worker         what is not zero-copy is copied, messages are posted
//   land          reduce worker       contains:
//     wait                              until the messages are there
//     reduce                            neighbours are read, slices summed
//     let_go                            tells others that it reads no more, waits until they read no more
//   settle        optimizer's caller  (no bucket) until all that was launched has been reduced; contains:
//     agree                             until all ranks are there
//   update        optimizer's caller  the shard's states and parameters
//   gather        optimizer's caller  messages are posted
//   gather_wait   optimizer's caller  until others' parameters are there; if hidden, on a reader's thread or a worker
//   fetch, fetch_wait, release  a reader's thread (stage 3): sharded parameters come, are waited for, and go
//   gather_grads, gather_grads_wait   where backward ends: the same for whole gradients
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <string>

namespace zx {

// A range that lasts as long as the object, named "zerox::what" or "zerox::what bucket 3". Without a profiler it only
// costs a look at a thread-local: names are made for a profiler only.
class Range {
 public:
  explicit Range(const char* what) : function_(at::RecordScope::USER_SCOPE) {
    if (function_.isActive()) function_.before(std::string("zerox::") + what);
  }
  Range(const char* what, int64_t bucket) : function_(at::RecordScope::USER_SCOPE) {
    if (function_.isActive()) function_.before(std::string("zerox::") + what + " bucket " + std::to_string(bucket));
  }

 private:
  at::RecordFunction function_;
};

}  // namespace zx
