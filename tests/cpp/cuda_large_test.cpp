// CUDA kernels past 2^31 and 2^32 elements, run on the host. The arrays take no memory where nobody touches them, and
// the kernels touch segments only: so these lie around the borders, far apart in padding.
#include <sys/mman.h>

#include "cuda_shards.h"
#include "math/scalar_lane.h"

namespace {

using namespace zx::testing;
using zx::DType;
using zx::Master;
using zx::Segment;

template <class T>
class SparseArray {
 public:
  explicit SparseArray(int64_t numel)
      : bytes_(static_cast<size_t>(numel) * sizeof(T)),
        data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    CHECK(data_ != MAP_FAILED);
  }
  ~SparseArray() { munmap(data_, bytes_); }
  SparseArray(const SparseArray&) = delete;
  SparseArray& operator=(const SparseArray&) = delete;
  T* data() { return static_cast<T*>(data_); }
  T& operator[](int64_t i) { return data()[i]; }

 private:
  size_t bytes_;
  void* data_;
};

// 301 elements from a little before each border on, and the last ones.
std::vector<Segment> around_borders(int64_t numel) {
  std::vector<Segment> segments;
  for (const int64_t border : {int64_t{0}, int64_t{1} << 31, int64_t{1} << 32}) {
    const int64_t start = border == 0 ? 0 : border - 100;
    if (start + 1000 < numel) segments.push_back({start, start + 301, 0, 0, start});
  }
  segments.push_back({numel - 301, numel, 0, 0, numel - 301});
  return segments;
}

TEST(update_reaches_elements_past_two_to_the_32) {
  const int64_t numel = (int64_t{1} << 32) + 5000;
  SparseArray<float> param(numel);
  SparseArray<zx::bf16> grad(numel);  // a thread then takes 8 elements, and half as many threads will do
  SparseArray<float> exp_avg(numel);
  SparseArray<float> exp_avg_sq(numel);
  const std::vector<Segment> segments = around_borders(numel);
  CHECK_EQ(segments.size(), size_t{4});
  for (const auto& [start, stop, row, number, from] : segments) {
    for (int64_t i = start; i < stop; ++i) {
      param[i] = static_cast<float>(i % 1000);
      grad[i] = zx::float_to_bf16(static_cast<float>(i % 7 - 3));
    }
  }
  const zx::Adam::Options options{1e-3, 0.9, 0.999, 1e-8, 1e-2, 0.0, 1.0, 0.0};
  const std::vector<uint8_t> present(segments.size(), 1);
  std::vector<int64_t> steps(segments.size(), 0);
  std::vector<char> scratch(segments.size() * zx::cuda::kFoldedBytes);
  CHECK_EQ(zx::cuda::update({zx::RuleKind::adam,
                             DType::f32,
                             Master::none,
                             DType::bf16,
                             param.data(),
                             nullptr,
                             grad.data(),
                             {zx::StateKind::wide, {{exp_avg.data(), nullptr}, {exp_avg_sq.data(), nullptr}, {}}},
                             numel},
                            {segments.data(), static_cast<int64_t>(segments.size()), present.data(), steps.data(),
                             &options.lr, nullptr, scratch.data()},
                            kHost),
           0);
  using Lane = zx::ScalarLane<float>;
  const auto step = zx::Adam::narrow<float>(zx::Adam::fold(options, 1, 1.0));
  for (const auto& [start, stop, row, number, from] : segments) {
    for (int64_t i = start; i < stop; ++i) {
      zx::Lanes<Lane, 2> at{{static_cast<float>(i % 1000)}, {{0.0F}, {0.0F}}};
      zx::Adam::update(step, Lane{static_cast<float>(i % 7 - 3)}, at);
      CHECK_EQ(param[i], at.param.x);
      CHECK_EQ(exp_avg_sq[i], at.state[zx::Adam::kExpAvgSq].x);
    }
  }
}

TEST(norm_reaches_elements_past_two_to_the_31) {
  const int64_t numel = (int64_t{1} << 31) + 5000;
  SparseArray<zx::bf16> values(numel);
  const std::vector<Segment> segments = around_borders(numel);
  CHECK_EQ(segments.size(), size_t{3});
  Words expected{};
  for (const auto& [start, stop, row, number, from] : segments) {
    for (int64_t i = start; i < stop; ++i) values[i] = zx::float_to_bf16(static_cast<float>(i % 11));
    zx::kernels_scalar().norm(zx::Norm::sum_of_squares, DType::bf16, &values[start], stop - start, {}, expected.data());
  }
  zx::exact_carry(expected.data());
  Words words{};
  CHECK_EQ(zx::cuda::norm({DType::bf16, values.data(), numel, segments.data(), static_cast<int64_t>(segments.size()),
                           2.0, words.data()},
                          kHost),
           0);
  CHECK_EQ(words, expected);
}

}  // namespace
