// Constants of a segment, folded where its step count lives.
#include "cuda/fold.cuh"

#include "cuda/together.cuh"

namespace zx::cuda {
namespace {

// Constants that leave the bounds of unchecked.cuh to the elements.
template <class T>
__device__ __forceinline__ bool is_ordinary(const AdamStep<T>& step) {
  return step.bias_correction2_sqrt >= T(0x1p-20) && step.bias_correction2_sqrt <= T(1) && step.eps <= T(0x1p+20);
}

template <class T>
__device__ __forceinline__ void fold_tiles(const AdamSegments& s, TileRange tiles) {
  const double grad_scale = s.grad_scale != nullptr ? *s.grad_scale : 1.0;
  auto* folded = static_cast<Folded<T>*>(s.folded);
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    const int64_t i = tile * kThreads + threadIdx.x;
    if (i >= s.count) return;
    Folded<T> fold{};
    fold.active = s.present[i] != 0;
    if (fold.active) {
      const Segment& segment = s.segments[i];
      const AdamOptions& options = s.options[segment.options_row];
      const int64_t step = ++s.steps[i];
      fold.step = narrow<T>(fold_adam(options, step, grad_scale));
      fold.inverse_bias_correction2_sqrt = T(1) / fold.step.bias_correction2_sqrt;
      fold.ordinary = is_ordinary(fold.step);
      fold.random_key = random_key(step, segment.param);
      fold.param_shift = segment.param_start - segment.start;
      fold.amsgrad = options.amsgrad != 0.0;
    }
    folded[i] = fold;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) fold_kernel(ZX_GRID_CONSTANT const Together<AdamSegments> together) {
  for_each_shard(together, [](const AdamSegments& s, TileRange tiles) { fold_tiles<T>(s, tiles); });
}

}  // namespace

int fold(const AdamShards& shards, Stream stream) {
  Together<AdamSegments> together;
  for (const AdamShard& shard : shards) together.add(shard.segments, tiles_for(shard.segments.count, kThreads));
  const auto kernel = shards.elements().param_dtype == DType::f64 ? fold_kernel<double> : fold_kernel<float>;
  return launch(kernel, together.num_tiles(), stream, together);
}

}  // namespace zx::cuda
