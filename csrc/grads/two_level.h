// The reduction over a mesh of two axes: see Note [Two levels] in exchange/two_level_exchange.h.
#pragma once

#include <memory>

#include "exchange/exchange.h"
#include "grads/reduction.h"

namespace zx {

std::unique_ptr<Reduction> make_two_level_reduction(std::shared_ptr<Exchange> inner, std::shared_ptr<Exchange> outer);

}  // namespace zx
