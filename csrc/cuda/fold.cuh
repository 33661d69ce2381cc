// Folds the constants of a segment where its step count lives: on the device.
#pragma once

#include "cuda/device.cuh"
#include "cuda/find.cuh"
#include "cuda/kernels.h"
#include "math/random.h"

namespace zx::cuda {

template <class Rule, class T>
struct Folded {
  typename Rule::template Step<T> step;
  RandomKey random_key;
  bool active;
  FirstStates<Rule> states;
  int64_t param_shift;  // plus the shard's element, this is the parameter's element
};

// Writes a Folded<Rule, double> or Folded<Rule, float> for each segment of each shard, and counts its step.
int fold(const UpdateShards& shards, Stream stream);

// The segment or the gap around an element, and what to do there.
template <class Rule, class T>
struct FoundSegment {
  FoundRow row;
  Folded<Rule, T> folded{};

  template <class Args>
  __device__ __forceinline__ void find(const Args& a, int64_t i) {
    if (row.has(i)) return;
    row.find(a.segments, a.num_segments, a.numel, i);
    if (row.is_gap) {
      folded.active = false;
    } else {
      folded = a.folded[row.index];
    }
  }
};

}  // namespace zx::cuda
