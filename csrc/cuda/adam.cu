// The update: one pass from a shard's gradient to moments, master and parameter, for any number of segments.
#include <type_traits>

#include "cuda/device.cuh"
#include "cuda/find.cuh"
#include "cuda/kernels.h"
#include "cuda/pack.cuh"
#include "math/scalar_lane.h"

namespace zx::cuda {
namespace {

// ---- constants of a segment, folded where its step count lives

template <class T>
struct Folded {
  AdamStep<T> step;
  bool active;
  bool amsgrad;
};
static_assert(sizeof(Folded<double>) <= kFoldedBytes && sizeof(Folded<float>) <= kFoldedBytes);

template <class T>
__global__ void __launch_bounds__(kThreads) fold_kernel(AdamSegments s) {
  const double grad_scale = s.grad_scale != nullptr ? *s.grad_scale : 1.0;
  auto* folded = static_cast<Folded<T>*>(s.folded);
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < s.count; i += stride) {
    Folded<T> fold{};
    fold.active = s.present[i] != 0;
    if (fold.active) {
      const AdamOptions& options = s.options[s.segments[i].options_row];
      fold.step = narrow<T>(fold_adam(options, ++s.steps[i], grad_scale));
      fold.amsgrad = options.amsgrad != 0.0;
    }
    folded[i] = fold;
  }
}

// ---- where a parameter's exact value lies: N of them in registers, as the type that is computed in

template <class Param>
struct PlainParam {
  using Value = std::conditional_t<std::is_same_v<Param, double>, double, float>;
  static constexpr int kNarrowestBytes = sizeof(Param);
  Param* param;

  template <int N>
  struct Held {
    Pack<Param, N> param;
    __device__ __forceinline__ Value get(int i) const { return ScalarLane<Value>::load(&param.at[i]).x; }
    __device__ __forceinline__ void set(int i, Value value) { ScalarLane<Value>{value}.store(&param.at[i]); }
  };
  template <int N>
  __device__ __forceinline__ Held<N> load(int64_t i) const {
    return {cuda::load<N>(param + i)};
  }
  template <int N>
  __device__ __forceinline__ void store(const Held<N>& held, int64_t i) const {
    cuda::store(held.param, param + i);
  }
};

struct SplitParam {
  using Value = float;
  static constexpr int kNarrowestBytes = sizeof(bf16);
  bf16* param;
  int16_t* remainder;

  template <int N>
  struct Held {
    Pack<bf16, N> param;
    Pack<int16_t, N> remainder;
    __device__ __forceinline__ float get(int i) const {
      return ScalarLane<float>::load_split(&param.at[i], &remainder.at[i]).x;
    }
    __device__ __forceinline__ void set(int i, float value) {
      ScalarLane<float>{value}.store_split(&param.at[i], &remainder.at[i]);
    }
  };
  template <int N>
  __device__ __forceinline__ Held<N> load(int64_t i) const {
    return {cuda::load<N>(param + i), cuda::load<N>(remainder + i)};
  }
  template <int N>
  __device__ __forceinline__ void store(const Held<N>& held, int64_t i) const {
    cuda::store(held.param, param + i);
    cuda::store(held.remainder, remainder + i);
  }
};

template <class Half>
struct MasteredParam {
  using Value = float;
  static constexpr int kNarrowestBytes = sizeof(Half);
  Half* param;
  float* master;

  template <int N>
  struct Held {
    Pack<Half, N> param;
    Pack<float, N> master;
    __device__ __forceinline__ float get(int i) const {
      return ScalarLane<float>::load_master(&param.at[i], &master.at[i]).x;
    }
    __device__ __forceinline__ void set(int i, float value) {
      master.at[i] = value;
      ScalarLane<float>{value}.store(&param.at[i]);
    }
  };
  template <int N>
  __device__ __forceinline__ Held<N> load(int64_t i) const {
    return {cuda::load<N>(param + i), cuda::load<N>(master + i)};
  }
  template <int N>
  __device__ __forceinline__ void store(const Held<N>& held, int64_t i) const {
    cuda::store(held.param, param + i);
    cuda::store(held.master, master + i);
  }
};

// ---- the kernel

template <class Where, class Grad>
struct AdamArgs {
  using Value = typename Where::Value;
  // So many elements a thread that the narrowest stream, too, moves 16 bytes at a time.
  static constexpr int kNarrowest = Where::kNarrowestBytes < sizeof(Grad) ? Where::kNarrowestBytes : sizeof(Grad);
  static constexpr int kVector = kAccessBytes / kNarrowest;

  Where where;
  const Grad* grad;
  Value* exp_avg;
  Value* exp_avg_sq;
  Value* max_exp_avg_sq;
  int64_t numel;
  const Segment* segments;
  int64_t num_segments;
  const Folded<Value>* folded;
  bool aligned;  // all of the pointers above, to 16 bytes
};

template <bool kAmsgrad, int N, class Args, class T = typename Args::Value>
__device__ __forceinline__ void update(const Args& a, const AdamStep<T>& step, int64_t i) {
  const auto grad = load<N>(a.grad + i);
  auto param = a.where.template load<N>(i);
  auto exp_avg = load<N>(a.exp_avg + i);
  auto exp_avg_sq = load<N>(a.exp_avg_sq + i);
  Pack<T, N> largest{};
  if constexpr (kAmsgrad) largest = load<N>(a.max_exp_avg_sq + i);
  ZX_UNROLL
  for (int j = 0; j < N; ++j) {
    AdamLanes<ScalarLane<T>> at{{param.get(j)}, {exp_avg.at[j]}, {exp_avg_sq.at[j]}, {largest.at[j]}};
    adam_update<kAmsgrad>(step, ScalarLane<T>::load(&grad.at[j]), at);
    param.set(j, at.param.x);
    exp_avg.at[j] = at.exp_avg.x;
    exp_avg_sq.at[j] = at.exp_avg_sq.x;
    largest.at[j] = at.max_exp_avg_sq.x;
  }
  a.where.store(param, i);
  store(exp_avg, a.exp_avg + i);
  store(exp_avg_sq, a.exp_avg_sq + i);
  if constexpr (kAmsgrad) store(largest, a.max_exp_avg_sq + i);
}

// The segment or the gap around an element, and what to do there.
template <class T>
struct Stretch {
  int64_t start = 0;
  int64_t stop = 0;
  Folded<T> folded{};

  template <class Args>
  __device__ __forceinline__ void find(const Args& a, int64_t i) {
    if (start <= i && i < stop) return;
    const int64_t row = first_ending_after(a.segments, int64_t{0}, a.num_segments, i);
    const int64_t next = row < a.num_segments ? a.segments[row].start : a.numel;
    if (next <= i) {
      start = next;
      stop = a.segments[row].stop;
      folded = a.folded[row];
    } else {
      start = i;
      stop = next;
      folded.active = false;
    }
  }
  template <int N, class Args>
  __device__ __forceinline__ void update_at(const Args& a, int64_t i) const {
    if (!folded.active) return;
    if (folded.amsgrad) {
      update<true, N>(a, folded.step, i);
    } else {
      update<false, N>(a, folded.step, i);
    }
  }
};

template <class Args>
__global__ void __launch_bounds__(kThreads) adam_kernel(Args a) {
  constexpr int kVector = Args::kVector;
  constexpr int64_t kTile = int64_t{kThreads} * kVector;
  Stretch<typename Args::Value> stretch;
  const TileRange tiles = tiles_of_block(tiles_for(a.numel, kTile));
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    const int64_t first = tile * kTile + int64_t{threadIdx.x} * kVector;
    if (first >= a.numel) return;
    stretch.find(a, first);
    if (a.aligned && first + kVector <= stretch.stop) {
      stretch.template update_at<kVector>(a, first);
    } else {  // an end of a segment lies inside
      const int64_t stop = first + kVector < a.numel ? first + kVector : a.numel;
      for (int64_t i = first; i < stop; ++i) {
        stretch.find(a, i);
        stretch.template update_at<1>(a, i);
      }
    }
  }
}

// ---- which kernel

template <class Where, class Grad>
int launch_adam(const AdamElements& e, const AdamSegments& s, Where where, Stream stream) {
  using Args = AdamArgs<Where, Grad>;
  using T = typename Args::Value;
  const Args args{where,
                  static_cast<const Grad*>(e.grad),
                  static_cast<T*>(e.exp_avg),
                  static_cast<T*>(e.exp_avg_sq),
                  static_cast<T*>(e.max_exp_avg_sq),
                  e.numel,
                  s.segments,
                  s.count,
                  static_cast<const Folded<T>*>(s.folded),
                  is_aligned(e.param) && is_aligned(e.master) && is_aligned(e.grad) && is_aligned(e.exp_avg) &&
                      is_aligned(e.exp_avg_sq) && is_aligned(e.max_exp_avg_sq)};
  const int error = launch(fold_kernel<T>, tiles_for(s.count, kThreads), stream, s);
  if (error != cudaSuccess) return error;
  return launch(adam_kernel<Args>, tiles_for(e.numel, int64_t{kThreads} * Args::kVector), stream, args);
}

template <class Where>
int adam_grad(const AdamElements& e, const AdamSegments& s, Where where, Stream stream) {
  switch (e.grad_dtype) {
    case DType::f64:
      if constexpr (std::is_same_v<typename Where::Value, double>) {
        return launch_adam<Where, double>(e, s, where, stream);
      }
      break;  // refused at the door: 16- and 32-bit parameters have no fp64 gradients
    case DType::f32:
      return launch_adam<Where, float>(e, s, where, stream);
    case DType::bf16:
      return launch_adam<Where, bf16>(e, s, where, stream);
    case DType::f16:
      return launch_adam<Where, f16>(e, s, where, stream);
  }
  return cudaErrorInvalidValue;
}

template <class Half>
int adam_half(const AdamElements& e, const AdamSegments& s, Stream stream) {
  auto* param = static_cast<Half*>(e.param);
  if (e.master_kind == Master::fp32) {
    return adam_grad(e, s, MasteredParam<Half>{param, static_cast<float*>(e.master)}, stream);
  }
  if constexpr (std::is_same_v<Half, bf16>) {
    if (e.master_kind == Master::remainder) {
      return adam_grad(e, s, SplitParam{param, static_cast<int16_t*>(e.master)}, stream);
    }
  }
  return adam_grad(e, s, PlainParam<Half>{param}, stream);
}

}  // namespace

int adam(const AdamElements& e, const AdamSegments& s, Stream stream) {
  switch (e.param_dtype) {
    case DType::f64:
      return adam_grad(e, s, PlainParam<double>{static_cast<double*>(e.param)}, stream);
    case DType::f32:
      return adam_grad(e, s, PlainParam<float>{static_cast<float*>(e.param)}, stream);
    case DType::bf16:
      return adam_half<bf16>(e, s, stream);
    case DType::f16:
      return adam_half<f16>(e, s, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace zx::cuda
