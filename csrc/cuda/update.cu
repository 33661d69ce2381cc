// The update with wide states, and the choice between the kinds of states.
#include "cuda/update.cuh"

namespace zx::cuda {
namespace {

template <class Rule>
int update_wide(const UpdateShards& shards, Stream stream) {
  const auto launch = [&](auto where, auto grad) {
    using Where = typename decltype(where)::type;
    return launch_update<Rule, Where, typename Where::Value, typename decltype(grad)::type>(shards, stream);
  };
  if (shards.elements().param_dtype == DType::f64) return with_grad<PlainParam<double>>(shards.elements(), launch);
  return with_param(shards.elements(), launch);
}

int update_together(const UpdateShards& shards, Stream stream) {
  const int error = fold(shards, stream);
  if (error != cudaSuccess) return error;
  switch (shards.elements().states.kind) {
    case StateKind::wide:
      return with_rule(shards.elements().rule,
                       [&](auto rule) { return update_wide<typename decltype(rule)::type>(shards, stream); });
    case StateKind::bf16:
      return update_bf16(shards, stream);
    case StateKind::blockwise:
      return update_blockwise(shards, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int update(const UpdateShards& shards, Stream stream) {
  for (int64_t first = 0; first < shards.count; first += kMostTogether) {
    const int64_t left = shards.count - first;
    const int error = update_together({shards.shards + first, left < kMostTogether ? left : kMostTogether}, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace zx::cuda
