// The update of the rows of a table that a step touches: one pass over their gradients, states and values. Rows are
// read where they lie.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cuda/device.cuh"
#include "cuda/pack.cuh"
#include "cuda/update_param.cuh"
#include "math/rules.h"
#include "math/scalar_lane.h"
#include "math/sparse_adam.h"

namespace zx::cuda {
namespace {

// What a rule's dense update does to one element of a touched row.
template <class OfRule>
struct RowMath {
  using Rule = OfRule;
  static constexpr int kMost = kMostStatesOf<Rule>;
  typename Rule::template Step<float> step;
  FirstStates<Rule> states;

  RowMath(const typename Rule::Options& options, int64_t num_updates, double scale)
      : step(Rule::template narrow<float>(Rule::fold(options, num_updates, scale))),
        states(first_states<Rule>(Rule::num_states(options))) {}

  template <int kStates>
  __device__ __forceinline__ void update(float grad, Lanes<ScalarLane<float>, kStates>& lanes) const {
    Rule::update(step, ScalarLane<float>{grad}, lanes);
  }
};

// Adam's is lazy: see SparseAdam. Its roots are rounded correctly, as torch's are on CUDA.
template <>
struct RowMath<Adam> {
  using Rule = Adam;
  static constexpr int kMost = 2;
  SparseAdam rule;
  float factor;
  FirstStates<Adam> states;

  RowMath(const Adam::Options& options, int64_t num_updates, double scale)
      : rule(SparseAdam::of(options.lr, options.beta1, options.beta2, options.eps, num_updates)),
        factor(static_cast<float>(options.maximize != 0.0 ? -scale : scale)),
        states(first_states<Adam>(2)) {}

  template <int kStates>
  __device__ __forceinline__ void update(float grad, Lanes<ScalarLane<float>, kStates>& lanes) const {
    auto& [mean, square] = lanes.state;
    rule.advance(grad * factor, mean.x, square.x);
    lanes.param.x = rule.moved(lanes.param.x, mean.x, std::sqrt(square.x));
  }
};

// `where`: the values, which lie by rows, and the master, which lies by places.
template <class OfRule, class Where>
struct RowArgs {
  using Rule = OfRule;
  static constexpr int kMost = RowMath<Rule>::kMost;
  RowMath<Rule> math;
  Where where;
  float scale;  // of gradients before they are cut at `limit`
  float limit;
  bool is_cut;
  bool aligned;  // rows, to 16 bytes
  int64_t numel;
  int64_t width;
  const int64_t* rows;
  const int64_t* places;
  const float* grads;
  float* states[kMost];
};

// As torch's clamp(): NaN stays.
template <class Args>
__device__ __forceinline__ float limited(const Args& a, float grad) {
  if (!a.is_cut) return grad;
  const float scaled = grad * a.scale;
  return scaled > a.limit ? a.limit : scaled < -a.limit ? -a.limit : scaled;
}

// N neighbours of one row.
template <int kStates, int N, class Args>
__device__ __forceinline__ void update_neighbours(const Args& a, int64_t i) {
  const int64_t row = i / a.width;
  const int64_t at = a.places[row] * a.width + (i - row * a.width);
  auto where = a.where;
  where.param += (a.rows[row] - a.places[row]) * a.width;  // so that one index is for values and master
  const auto grad = load<N, kOnce>(a.grads + i);
  auto values = where.template load<N>(at);
  Pack<float, N> states[kRoomFor<kStates>];
  ZX_UNROLL
  for (int s = 0; s < kStates; ++s) states[s] = load<N>(a.states[s] + at);
  ZX_UNROLL
  for (int j = 0; j < N; ++j) {
    Lanes<ScalarLane<float>, kStates> lanes;
    lanes.param.x = values.get(j);
    ZX_UNROLL
    for (int s = 0; s < kStates; ++s) lanes.state[s].x = states[s].at[j];
    a.math.update(limited(a, grad.at[j]), lanes);
    values.set(j, lanes.param.x);
    ZX_UNROLL
    for (int s = 0; s < kStates; ++s) states[s].at[j] = lanes.state[s].x;
  }
  where.store(values, at);
  ZX_UNROLL
  for (int s = 0; s < kStates; ++s) store<Stores::whole>(states[s], a.states[s] + at);
}

constexpr int kNeighbours = kAccessBytes / sizeof(float);

template <class Args>
__global__ void __launch_bounds__(kThreads) update_rows_kernel(ZX_GRID_CONSTANT const Args a) {
  const int64_t each = a.aligned ? kNeighbours : 1;
  const TileRange tiles = tiles_of_block(tiles_for(a.numel, kThreads * each));
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    const int64_t i = (tile * kThreads + threadIdx.x) * each;
    if (i >= a.numel) return;
    with_num_states<typename Args::Rule>(a.math.states, [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      constexpr int kStates = kCount < Args::kMost ? kCount : Args::kMost;
      if (a.aligned) {
        update_neighbours<kStates, kNeighbours>(a, i);
      } else {
        update_neighbours<kStates, 1>(a, i);
      }
    });
  }
}

template <class Rule, class Where>
int launch_rows(const RowUpdate& update, const UpdateElements& elements, Stream stream) {
  using Args = RowArgs<Rule, Where>;
  typename Rule::Options options;
  std::memcpy(&options, update.options, sizeof(options));
  const TouchedRows& t = update.touched;
  const bool is_cut = std::isfinite(update.limit);
  Args args{RowMath<Rule>(options, update.num_updates, is_cut ? 1.0 : update.scale),
            Where(elements),
            static_cast<float>(update.scale),
            static_cast<float>(update.limit),
            is_cut,
            t.width % kNeighbours == 0 && is_aligned(t.grads) && is_aligned(t.values) && is_aligned(t.master),
            t.count * t.width,
            t.width,
            t.rows,
            t.places,
            t.grads,
            {}};
  for (int s = 0; s < Args::kMost; ++s) {
    args.states[s] = t.states[s];
    args.aligned = args.aligned && is_aligned(t.states[s]);
  }
  const int64_t each = args.aligned ? kNeighbours : 1;
  return launch(update_rows_kernel<Args>, tiles_for(args.numel, kThreads * each), stream, args);
}

}  // namespace

int update_rows(const RowUpdate& update, Stream stream) {
  UpdateElements elements{};
  elements.param_dtype = update.touched.dtype;
  elements.param = update.touched.values;
  elements.master_kind = update.touched.master_kind;
  elements.master = update.touched.master;
  elements.grad_dtype = DType::f32;
  return with_rule(update.rule, [&](auto rule) {
    return with_param(elements, [&](auto where, auto grad) -> int {
      if constexpr (std::is_same_v<typename decltype(grad)::type, float>) {
        return launch_rows<typename decltype(rule)::type, typename decltype(where)::type>(update, elements, stream);
      }
      return cudaErrorInvalidValue;
    });
  });
}

}  // namespace zx::cuda
