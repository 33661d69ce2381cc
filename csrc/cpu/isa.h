// Which instruction set the CPU kernels use in this process.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace zx {

// The instruction sets that this CPU has, slowest first.
std::vector<std::string> supported_isas();

// "" picks the fastest. Throws std::invalid_argument for a name that is unknown or that this CPU lacks.
void select_isa(const std::string& name);

const KernelTable& kernels();

}  // namespace zx
