// Finds others that hook the parameters' AccumulateGrad nodes, and would average their gradients too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace zx {

// Note [Other reducers]
// DistributedDataParallel and other zerox optimizers hook the same nodes, and each would send what another took. An
// optimizer always does. DDP does so only in a backward of its own forward: a wrapper that evaluates, or that ran its
// forward in its no_sync(), leaves gradients alone. Its reducer knows which; Python finds the wrapper that a hook
// belongs to.

// The hooks of all living bucket managers.
void add_own_hook(uintptr_t hook);
void remove_own_hook(uintptr_t hook);
bool is_own_hook(uintptr_t hook);

// Parameters with hooks of others, and the number of such hooks on each.
struct HookedByOthers {
  std::vector<at::Tensor> params;
  std::vector<int64_t> counts;
};

// Returns the first of these whose gradient another reducer takes in the backward that begins; -1 if there is none.
using FindReduced = std::function<int64_t(const HookedByOthers&)>;
void set_find_reduced(FindReduced find);
int64_t find_reduced(const HookedByOthers& hooked);

}  // namespace zx
