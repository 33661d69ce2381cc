#include "cpu/large_pages.h"

#include <c10/util/Exception.h>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace zx {

void advise_large_pages(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_cpu(), "zerox: large pages are for CPU tensors, got one on ", tensor.device());
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) + page - 1) / page * page;
  const auto stop = (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) + tensor.nbytes()) / page * page;
  if (start < stop) (void)madvise(reinterpret_cast<void*>(start), stop - start, MADV_HUGEPAGE);
#endif
}

}  // namespace zx
