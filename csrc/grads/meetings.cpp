#include "grads/meetings.h"

namespace zx {

const char* name_of(int64_t meeting) {
  constexpr const char* kNames[] = {"the end of join()",
                                    "the end of backward()",
                                    "step()",
                                    "clip_grad_norm_()",
                                    "synchronize()",
                                    "GradScaler.unscale_()",
                                    "mean_over()",
                                    "scale_grads_()",
                                    "zerox.clip_grad_norm_()",
                                    "GradScaler.step()",
                                    "clip_grad_value_()",
                                    "add_param_group()",
                                    "zerox.save() or zerox.load()",
                                    "full_state_dict()",
                                    "broadcast_buffers()",
                                    "full_grad(), full_state() or what sets these",
                                    "a change of masks by zerox.Sparsity"};
  return kNames[meeting + 1];
}

}  // namespace zx
