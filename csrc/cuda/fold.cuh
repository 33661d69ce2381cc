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
  bool active;
  bool amsgrad;
};
static_assert(sizeof(Folded<double>) <= kFoldedBytes && sizeof(Folded<float>) <= kFoldedBytes);

// Writes a Folded<double> or Folded<float> for each segment to s.folded, and counts its step.
int fold(bool as_double, const AdamSegments& s, Stream stream);

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
};

}  // namespace zx::cuda
