// Folds the constants of a segment where its step count lives: on the device.
#include "cuda/fold.cuh"

#include "cuda/together.cuh"

namespace zx::cuda {
namespace {

template <class Rule, class T>
__device__ __forceinline__ void fold_tiles(const UpdateSegments& s, TileRange tiles) {
  static_assert(sizeof(Folded<Rule, T>) <= kFoldedBytes);
  const double grad_scale = s.grad_scale != nullptr ? *s.grad_scale : 1.0;
  const auto* rows = reinterpret_cast<const typename Rule::Options*>(s.options);
  auto* folded = static_cast<Folded<Rule, T>*>(s.folded);
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    const int64_t i = tile * kThreads + threadIdx.x;
    if (i >= s.count) return;
    Folded<Rule, T> fold{};
    fold.active = s.present[i] != 0;
    if (fold.active) {
      const Segment& segment = s.segments[i];
      const auto& options = rows[segment.options_row];
      const int64_t step = Rule::counts_step(options) ? ++s.steps[i] : s.steps[i];
      fold.step = Rule::template narrow<T>(Rule::fold(options, step, grad_scale));
      fold.random_key = random_key(step, segment.param);
      fold.param_shift = segment.param_start - segment.start;
      fold.states = first_states<Rule>(Rule::num_states(options));
    }
    folded[i] = fold;
  }
}

template <class Rule, class T>
__global__ void __launch_bounds__(kThreads, 1) fold_kernel(ZX_GRID_CONSTANT const Together<UpdateSegments> together) {
  for_each_shard(together, [](const UpdateSegments& s, TileRange tiles) { fold_tiles<Rule, T>(s, tiles); });
}

}  // namespace

int fold(const UpdateShards& shards, Stream stream) {
  Together<UpdateSegments> together;
  for (const UpdateShard& shard : shards) together.add(shard.segments, tiles_for(shard.segments.count, kThreads));
  return with_rule(shards.elements().rule, [&](auto type) {
    using Rule = typename decltype(type)::type;
    const bool wide = shards.elements().param_dtype == DType::f64;
    const auto kernel = wide ? fold_kernel<Rule, double> : fold_kernel<Rule, float>;
    return launch(kernel, together.num_tiles(), stream, together);
  });
}

}  // namespace zx::cuda
