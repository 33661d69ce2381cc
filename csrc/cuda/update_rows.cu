// The update of the rows of a table that a step touches: one pass over their gradients, states and values. Rows are
// read where they lie.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cuda/device.cuh"
#include "cuda/pack.cuh"
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

template <class Rule>
struct RowArgs {
  RowMath<Rule> math;
  float scale;  // of gradients before they are cut at `limit`
  float limit;
  bool is_cut;
  bool aligned;  // rows, to 16 bytes
  int64_t numel;
  int64_t width;
  const int64_t* rows;
  const int64_t* places;
  const float* grads;
  float* values;
  float* states[RowMath<Rule>::kMost];
};

// As torch's clamp(): NaN stays.
template <class Rule>
__device__ __forceinline__ float limited(const RowArgs<Rule>& a, float grad) {
  if (!a.is_cut) return grad;
  const float scaled = grad * a.scale;
  return scaled > a.limit ? a.limit : scaled < -a.limit ? -a.limit : scaled;
}

// N neighbours of one row.
template <int kStates, int N, class Rule>
__device__ __forceinline__ void update_neighbours(const RowArgs<Rule>& a, int64_t i) {
  const int64_t row = i / a.width;
  const int64_t column = i - row * a.width;
  float* const value = a.values + a.rows[row] * a.width + column;
  const int64_t state = a.places[row] * a.width + column;
  const auto grad = load<N, kOnce>(a.grads + i);
  auto values = load<N>(value);
  Pack<float, N> states[kRoomFor<kStates>];
  ZX_UNROLL
  for (int s = 0; s < kStates; ++s) states[s] = load<N>(a.states[s] + state);
  ZX_UNROLL
  for (int j = 0; j < N; ++j) {
    Lanes<ScalarLane<float>, kStates> lanes;
    lanes.param.x = values.at[j];
    ZX_UNROLL
    for (int s = 0; s < kStates; ++s) lanes.state[s].x = states[s].at[j];
    a.math.update(limited(a, grad.at[j]), lanes);
    values.at[j] = lanes.param.x;
    ZX_UNROLL
    for (int s = 0; s < kStates; ++s) states[s].at[j] = lanes.state[s].x;
  }
  store<Stores::whole>(values, value);
  ZX_UNROLL
  for (int s = 0; s < kStates; ++s) store<Stores::whole>(states[s], a.states[s] + state);
}

constexpr int kNeighbours = kAccessBytes / sizeof(float);

template <class Rule>
__global__ void __launch_bounds__(kThreads) update_rows_kernel(ZX_GRID_CONSTANT const RowArgs<Rule> a) {
  const int64_t each = a.aligned ? kNeighbours : 1;
  const TileRange tiles = tiles_of_block(tiles_for(a.numel, kThreads * each));
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    const int64_t i = (tile * kThreads + threadIdx.x) * each;
    if (i >= a.numel) return;
    with_num_states<Rule>(a.math.states, [&](auto count) {
      constexpr int kStates =
          decltype(count)::value < RowMath<Rule>::kMost ? decltype(count)::value : RowMath<Rule>::kMost;
      if (a.aligned) {
        update_neighbours<kStates, kNeighbours>(a, i);
      } else {
        update_neighbours<kStates, 1>(a, i);
      }
    });
  }
}

template <class Rule>
int launch_rows(const RowUpdate& update, Stream stream) {
  typename Rule::Options options;
  std::memcpy(&options, update.options, sizeof(options));
  const bool is_cut = std::isfinite(update.limit);
  bool aligned = update.width % kNeighbours == 0 && is_aligned(update.grads) && is_aligned(update.values);
  RowArgs<Rule> args{RowMath<Rule>(options, update.num_updates, is_cut ? 1.0 : update.scale),
                     static_cast<float>(update.scale),
                     static_cast<float>(update.limit),
                     is_cut,
                     false,
                     update.count * update.width,
                     update.width,
                     update.rows,
                     update.places,
                     update.grads,
                     update.values,
                     {}};
  for (int s = 0; s < RowMath<Rule>::kMost; ++s) {
    args.states[s] = update.states[s];
    aligned = aligned && is_aligned(update.states[s]);
  }
  args.aligned = aligned;
  const int64_t each = aligned ? kNeighbours : 1;
  return launch(update_rows_kernel<Rule>, tiles_for(args.numel, kThreads * each), stream, args);
}

}  // namespace

int update_rows(const RowUpdate& update, Stream stream) {
  return with_rule(update.rule, [&](auto type) { return launch_rows<typename decltype(type)::type>(update, stream); });
}

}  // namespace zx::cuda
