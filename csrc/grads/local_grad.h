// p.grad as a plain tensor, also where the parameter is a DTensor: see Note [Local tensors].
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "buckets/bucket.h"

namespace zx {

struct LocalGrad {
  at::Tensor tensor{};    // with the sizes of the slot's home; p.grad itself if that is a placeholder, or undefined
  std::string refusal{};  // why the gradient can't be sent; empty if it can
};

// Notes how a DTensor's gradient came.
LocalGrad local_grad(Slot& slot);

// What the elements of p.grad lie in, to be written in place.
at::Tensor values_of_grad(const Slot& slot);
void zero_grad_of(const Slot& slot);

// Makes p.grad have these elements.
void set_local_grad(Slot& slot, at::Tensor local);

// Whether a tensor is a placeholder of any optimizer, or a copy of one. The function may be called on any thread.
void set_placeholder_test(std::function<bool(const at::Tensor&)> is_placeholder);

// What only Python knows of DTensors. The functions may be called on any thread.
struct DTensorGrad {
  at::Tensor local{};
  SeenPlacements placements{};
  std::string refusal{};
};
struct DTensorFunctions {
  // The local tensor of a gradient that lies exactly as the parameter does; undefined if it may lie otherwise.
  std::function<at::Tensor(const at::Tensor& param, const at::Tensor& grad)> alike;
  std::function<DTensorGrad(const at::Tensor& param, const at::Tensor& grad)> find;
  std::function<at::Tensor(const at::Tensor& grad)> values_of;
  // A gradient of `param` with these elements; it may be `grad`, which then has them.
  std::function<at::Tensor(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& local, int64_t partial)>
      wrap;
};
void set_dtensor_functions(DTensorFunctions functions);

}  // namespace zx
