// Checks at the door of an op: each says which op, which argument, and both values.
#pragma once

#include <c10/util/Exception.h>

#define ZX_CHECK(condition, op, argument, ...) \
  TORCH_CHECK_VALUE(condition, "zerox::", op, ": `", argument, "` ", __VA_ARGS__)

#define ZX_CHECK_DTYPE(tensor, expected, op, argument) \
  ZX_CHECK((tensor).scalar_type() == (expected), op, argument, "must be ", (expected), ", got ", (tensor).scalar_type())

#define ZX_CHECK_NUMEL(tensor, expected, op, argument) \
  ZX_CHECK((tensor).numel() == (expected), op, argument, "must have ", (expected), " elements, got ", (tensor).numel())

#define ZX_CHECK_CONTIGUOUS(tensor, op, argument) \
  ZX_CHECK((tensor).is_contiguous(), op, argument, "must be contiguous, got strides ", (tensor).strides())
