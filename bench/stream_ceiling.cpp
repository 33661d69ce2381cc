// What memory gives an update at most: fp32 arrays are read, and all but the gradient written in place, with arithmetic
// that costs nothing. Compiled for the machine that it runs on, on torch's threads. Loaded by bench/limits.py.
#include <ATen/Parallel.h>

#include <cstdint>

namespace {

constexpr int64_t kBlock = 16384;

template <class... Floats>
void stream(const float* __restrict grad, int64_t numel, Floats* __restrict... arrays) {
  for (int64_t i = 0; i < numel; ++i) ((arrays[i] += grad[i]), ...);
}

}  // namespace

// `second`, or both states, may be null: then there are so many fewer.
extern "C" void update_shaped_stream(float* param, const float* grad, float* first, float* second, int64_t numel) {
  at::parallel_for(0, (numel + kBlock - 1) / kBlock, 2, [=](int64_t begin, int64_t end) {
    const int64_t start = begin * kBlock;
    const int64_t count = (end * kBlock < numel ? end * kBlock : numel) - start;
    if (first == nullptr) return stream(grad + start, count, param + start);
    if (second == nullptr) return stream(grad + start, count, param + start, first + start);
    stream(grad + start, count, param + start, first + start, second + start);
  });
}
