// Who else hooks the parameters' AccumulateGrad nodes, and would average their gradients too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace zx {

// Note [Other reducers]
// DistributedDataParallel and other optimizers of ours hook the same nodes; each would send what the other took. An
// optimizer always does. DDP does only in a backward of its own forward: a wrapper that evaluates, or whose forward ran
// in its no_sync(), leaves gradients alone. Its reducer knows; Python finds the wrapper that a hook belongs to.

// Hooks of ours, of all living bucket managers.
void add_own_hook(uintptr_t hook);
void remove_own_hook(uintptr_t hook);
bool is_own_hook(uintptr_t hook);

// A parameter with hooks of others, and how many.
struct HookedByOthers {
  std::vector<at::Tensor> params;
  std::vector<int64_t> counts;
};

// The first of these whose gradient somebody reduces in the backward that begins; -1 if nobody does.
using FindReduced = std::function<int64_t(const HookedByOthers&)>;
void set_find_reduced(FindReduced find);
int64_t find_reduced(const HookedByOthers& hooked);

}  // namespace zx
