// Memory in pages that cover more of it.
#pragma once

#include <ATen/core/Tensor.h>

namespace zx {

// Asks for large pages for a CPU tensor's memory that nobody has written yet; without effect where the system has none.
// The update reads four arrays at once, each megabytes from the others: in pages of 4 KiB it waits for their addresses.
void advise_large_pages(const at::Tensor& tensor);

}  // namespace zx
