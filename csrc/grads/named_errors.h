// Errors of a backward with the names that parameters have in the model.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <functional>
#include <string>
#include <vector>

#include "buckets/buckets.h"
#include "check.h"

namespace zx {

// Python finds the names: a text in which some of `params` are called as the optimizer calls them, by `names`.
using NameParams = std::function<std::string(const std::string& text, const std::vector<std::string>& names,
                                             const std::vector<at::Tensor>& params)>;
void set_name_params(NameParams name);

// Empty if the text calls no parameter by its position. It may look through all objects of Python.
std::string with_model_names(const std::string& text, const Buckets& buckets);

// What is at the edge to autograd, where errors leave. To be called without locks, since finding names needs the GIL.
template <class Body>
void naming_params(const Buckets& buckets, const Body& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    const std::string named = with_model_names(reason_of(error), buckets);
    if (named.empty()) throw;
    TORCH_CHECK(false, named);
  }
}

}  // namespace zx
