// Which instruction set is used, and what is refused.
#include <stdexcept>

#include "elements.h"

namespace {

using namespace zx::testing;

TEST(the_fastest_is_the_default_and_unknown_names_are_refused) {
  const std::vector<std::string> isas = zx::supported_isas();
  CHECK_EQ(isas.front(), "scalar");
  for (const std::string& isa : isas) {
    zx::select_isa(isa);
    CHECK_EQ(std::string(zx::kernels().name), isa);
  }
  zx::select_isa("scalar");
  zx::select_isa("");
  CHECK_EQ(std::string(zx::kernels().name), isas.back());
  std::string reason;
  try {
    zx::select_isa("mmx");
  } catch (const std::invalid_argument& error) {
    reason = error.what();
  }
  CHECK(reason.find("ZEROX_ISA=mmx") == 0);
  CHECK(reason.find(isas.back()) != std::string::npos);
  CHECK_EQ(std::string(zx::kernels().name), isas.back());
}

#if defined(__x86_64__)
TEST(every_instruction_set_of_this_cpu_is_there) {
  __builtin_cpu_init();
  size_t expected = 1;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    expected += avx512 ? 2 : 1;
    if (avx512 && __builtin_cpu_supports("avx512vbmi")) ++expected;
  }
  CHECK_EQ(zx::supported_isas().size(), expected);
}
#endif

}  // namespace
