// Collectives that Python calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "peers/failure_detector.h"

namespace zx {

// Note [Tensors that Python does not know]
// One of gloo's threads runs a collective, and keeps its tensors until it is through with it: a moment longer than the
// wait for it lasts, or much longer where cores are scarce. If Python has an object for such a tensor, the thread needs
// the GIL to let go of it, also if others keep the tensor. When the interpreter is about to end it gets no GIL, but is
// ended in the middle of a destructor, and the process aborts after all its work is done. A group of our own lives as
// long as its optimizer, which may be the interpreter's last object, so nothing ends its threads before. So tensors
// that Python has seen are given to collectives as others over the same memory. Single messages need no thread.
//
// The same goes for our workers: a flight takes gradients as others over the same memory, since it may still be on its
// way when the interpreter ends. And a user's group has to end in destroy_process_group(), with its threads: nothing
// keeps one alive (reference_to() in zerox/ranks/process_group.py).

// Over the same memory, and no view of the tensor, which a view would keep.
at::Tensor unknown_to_python(const at::Tensor& tensor);

Work start_all_reduce(const Group& group, const at::Tensor& values, c10d::ReduceOp::RedOpType op);
Work start_broadcast(const Group& group, const at::Tensor& values, int root);
// `received`: by rank, empty on ranks other than `root`.
Work start_gather(const Group& group, const std::vector<at::Tensor>& received, const at::Tensor& sent, int root);
Work start_all_gather(const Group& group, const std::vector<at::Tensor>& received, const at::Tensor& sent);
// 1-D; `from_each`, `to_each`: how many elements of `received` and `sent` come from and go to each rank.
Work start_all_to_all(const Group& group, const at::Tensor& received, const at::Tensor& sent,
                      std::vector<int64_t> from_each, std::vector<int64_t> to_each);

}  // namespace zx
