// Memory in large pages.
#pragma once

#include <ATen/core/Tensor.h>

namespace zx {

// Asks for large pages for the memory of a CPU tensor that has not been written yet. It has no effect if the system has
// no large pages. The update reads four arrays at once, each megabytes from the others: with pages of 4 KiB it waits
// for their addresses.
void advise_large_pages(const at::Tensor& tensor);

}  // namespace zx
