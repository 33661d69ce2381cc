// Constants of a segment, folded where its step count lives.
#pragma once

#include "cuda/device.cuh"
#include "cuda/find.cuh"
#include "cuda/kernels.h"
#include "math/random.h"

namespace zx::cuda {

template <class T>
struct Folded {
  AdamStep<T> step;
  RandomKey random_key;
  int64_t param_shift;  // added to an element of the shard it gives the parameter's
  T inverse_bias_correction2_sqrt;
  bool ordinary;  // see Note [Roots and quotients without a check each]
  bool active;
  bool amsgrad;
};
static_assert(sizeof(Folded<double>) <= kFoldedBytes && sizeof(Folded<float>) <= kFoldedBytes);

// Writes a Folded<double> or Folded<float> for each segment of each shard, and counts its step.
int fold(const AdamShards& shards, Stream stream);

// The segment or the gap around an element, and what to do there.
template <class T>
struct Stretch {
  Place place;
  Folded<T> folded{};

  template <class Args>
  __device__ __forceinline__ void find(const Args& a, int64_t i) {
    if (place.has(i)) return;
    place.find(a.segments, a.num_segments, a.numel, i);
    if (place.is_gap) {
      folded.active = false;
    } else {
      folded = a.folded[place.row];
    }
  }
};

}  // namespace zx::cuda
