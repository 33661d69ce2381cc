#include "grads/sync_points.h"

namespace zx {

const char* name_of(SyncPoint sync_point) {
  constexpr const char* kNames[] = {"the end of join()",     "the end of backward()", "step()",
                                    "clip_grad_norm_()",     "synchronize()",         "GradScaler.unscale_()",
                                    "mean_over()",           "scale_grads_()",        "zerox.clip_grad_norm_()",
                                    "GradScaler.step()",     "clip_grad_value_()",    "p.grad.norm()",
                                    "add_param_group()",     "zerox.save()",          "full_state_dict()",
                                    "broadcast_buffers()",   "full_grad()",           "Sparsity.step()",
                                    "broadcast_parameters()"};
  return kNames[static_cast<int64_t>(sync_point) + 1];
}

}  // namespace zx
