// Constants of a segment, folded where its step count lives.
#include "cuda/fold.cuh"

namespace zx::cuda {
namespace {

// Constants that leave the bounds of unchecked.cuh to the elements.
template <class T>
__device__ __forceinline__ bool is_ordinary(const AdamStep<T>& step) {
  return step.bias_correction2_sqrt >= T(0x1p-20) && step.bias_correction2_sqrt <= T(1) && step.eps <= T(0x1p+20);
}

template <class T>
__global__ void __launch_bounds__(kThreads) fold_kernel(AdamSegments s) {
  const double grad_scale = s.grad_scale != nullptr ? *s.grad_scale : 1.0;
  auto* folded = static_cast<Folded<T>*>(s.folded);
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < s.count; i += stride) {
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

}  // namespace

int fold(bool as_double, const AdamSegments& s, Stream stream) {
  const int64_t num_tiles = tiles_for(s.count, kThreads);
  return as_double ? launch(fold_kernel<double>, num_tiles, stream, s)
                   : launch(fold_kernel<float>, num_tiles, stream, s);
}

}  // namespace zx::cuda
