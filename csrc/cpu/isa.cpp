#include "cpu/isa.h"

#include <atomic>
#include <stdexcept>

namespace zx {
namespace {

std::vector<const KernelTable*> supported_tables() {
  std::vector<const KernelTable*> tables{&kernels_scalar()};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2) tables.push_back(&kernels_avx2());
#if !defined(ZX_WITHOUT_AVX512)  // by a sanitizer's build, on a CPU that has none
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    tables.push_back(&kernels_avx512());
    if (__builtin_cpu_supports("avx512vbmi")) tables.push_back(&kernels_avx512vbmi());
  }
#endif
#endif
  return tables;
}

std::atomic<const KernelTable*> selected{nullptr};

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : supported_tables()) names.emplace_back(table->name);
  return names;
}

void select_isa(const std::string& name) {
  std::string have;
  for (const KernelTable* table : supported_tables()) {
    if (name.empty() || name == table->name) selected = table;
    if (name == table->name) return;
    have += std::string(have.empty() ? "" : ", ") + table->name;
  }
  if (!name.empty()) {
    throw std::invalid_argument("ZEROX_ISA=" + name + ": this CPU can run " + have +
                                "; unset ZEROX_ISA to use the fastest");
  }
}

const KernelTable& kernels() {
  const KernelTable* table = selected.load(std::memory_order_relaxed);
  if (table == nullptr) {
    select_isa("");
    table = selected;
  }
  return *table;
}

}  // namespace zx
