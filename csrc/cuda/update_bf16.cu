// The update with states in bf16, rounded stochastically.
#include "cuda/update.cuh"

namespace zx::cuda {

int update_bf16(const UpdateShards& shards, Stream stream) {
  return with_rule(shards.elements().rule, [&](auto rule) {
    return with_param(shards.elements(), [&](auto where, auto grad) {
      return launch_update<typename decltype(rule)::type, typename decltype(where)::type, bf16,
                           typename decltype(grad)::type>(shards, stream);
    });
  });
}

}  // namespace zx::cuda
