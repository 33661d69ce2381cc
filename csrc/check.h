// Checks at the door of an op: each error names the op, the argument, and both values.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace zx {

// The message of an error, without the C++ stack that torch's errors carry.
inline std::string reason_of(const std::exception& error) {
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
  return from_torch != nullptr ? from_torch->what_without_backtrace() : error.what();
}

}  // namespace zx

#define ZX_CHECK(condition, op, argument, ...) \
  TORCH_CHECK_VALUE(condition, "zerox::", op, ": `", argument, "` ", __VA_ARGS__)

#define ZX_CHECK_DTYPE(tensor, expected, op, argument) \
  ZX_CHECK((tensor).scalar_type() == (expected), op, argument, "must be ", (expected), ", got ", (tensor).scalar_type())

#define ZX_CHECK_NUMEL(tensor, expected, op, argument) \
  ZX_CHECK((tensor).numel() == (expected), op, argument, "must have ", (expected), " elements, got ", (tensor).numel())

#define ZX_CHECK_CONTIGUOUS(tensor, op, argument) \
  ZX_CHECK((tensor).is_contiguous(), op, argument, "must be contiguous, got strides ", (tensor).strides())
