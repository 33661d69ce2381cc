// Spans of every dtype for the kernel tests: random elements with all the special ones, between canaries.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "math/exact_sum.h"
#include "math/rounding.h"

namespace zx::testing {

using Words = std::array<int64_t, kExactLimbs>;

inline constexpr std::array kDTypes{DType::f64, DType::f32, DType::bf16, DType::f16};
inline constexpr DType kU8{4};  // in tests only: codes of 8-bit moments
inline constexpr std::array<int64_t, 5> kBytes{8, 4, 2, 2, 1};
inline constexpr std::array<int64_t, 21> kSizes{0,  1,  2,  3,  4,  5,   7,   8,   9,    15,  16,
                                                17, 31, 33, 63, 65, 255, 256, 257, 1000, 2500};

inline int64_t bytes_of(DType dtype) { return kBytes[static_cast<size_t>(dtype)]; }
inline const char* name_of(DType dtype) {
  constexpr std::array names{"f64", "f32", "bf16", "f16", "u8"};
  return names[static_cast<size_t>(dtype)];
}

inline std::string joined(std::initializer_list<std::string_view> words) {
  std::string all;
  for (const std::string_view word : words) (all += word) += ' ';
  return all;
}

inline std::vector<const KernelTable*> vector_tables() {
  std::vector<const KernelTable*> tables;
  for (const std::string& isa : supported_isas()) {
    if (isa == "scalar") continue;
    select_isa(isa);
    tables.push_back(&kernels());
  }
  return tables;
}

// SplitMix64: three operations and no table, where std::mt19937_64 under sanitizers takes longer than what is tested.
struct RandomBits {
  using result_type = uint64_t;
  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return ~uint64_t{0}; }

  uint64_t operator()() {
    uint64_t bits = state += 0x9e3779b97f4a7c15;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
    return bits ^ (bits >> 31);
  }
  uint64_t state = 0;
};
inline RandomBits random_bits;

// Floating-point numbers of every kind as often as ordinary ones, which may cancel and round.
inline uint64_t random_element(DType dtype) {
  static constexpr std::array<double, 16> kSpecial{0.0,
                                                   -0.0,
                                                   1.0,
                                                   -1.0,
                                                   0x1p-149,
                                                   -0x1p-149,
                                                   0x1p-126,
                                                   0x1p-24,
                                                   0x1p-14,
                                                   65504.0,
                                                   65520.0,
                                                   0x1.fffffep+127,
                                                   -0x1.fffffep+127,
                                                   std::numeric_limits<double>::infinity(),
                                                   -std::numeric_limits<double>::infinity(),
                                                   std::numeric_limits<double>::quiet_NaN()};
  const uint64_t bits = random_bits();
  double value = static_cast<double>(static_cast<int64_t>(random_bits())) * 0x1p-62;  // [-2, 2]
  if (bits % 16 == 0) value = kSpecial[bits / 16 % kSpecial.size()];
  if (bits % 16 == 1) value *= std::ldexp(1.0, static_cast<int>(bits / 16 % 300) - 150);
  const bool any_pattern = bits % 16 == 2;
  switch (dtype) {
    case DType::f64:
      return any_pattern ? random_bits() : std::bit_cast<uint64_t>(value);
    case DType::f32:
      return any_pattern ? random_bits() : std::bit_cast<uint32_t>(static_cast<float>(value));
    case DType::bf16:
      return any_pattern ? random_bits() : float_to_bf16(static_cast<float>(value)).bits;
    case DType::f16:
      return any_pattern ? random_bits() : float_to_f16(static_cast<float>(value)).bits;
  }
  return random_bits();  // a code
}

// A mask for `numel` elements: they are kept by its bits from `first` on. A byte of 0s and one of 1s are among others.
inline std::vector<uint8_t> random_mask(int64_t numel, int64_t first) {
  std::vector<uint8_t> bytes(static_cast<size_t>((first + numel + 7) / 8 + kMaskPadding));
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = i % 5 == 1 ? uint8_t{0} : i % 5 == 3 ? uint8_t{255} : static_cast<uint8_t>(random_bits());
  }
  return bytes;
}

// `numel` elements that start `offset` elements behind an aligned address, between canaries. Under the address
// sanitizer there is none behind them: its own red zone starts at the first byte past the end, and sees reads too.
class Elements {
 public:
  Elements(DType dtype, int64_t numel, int64_t offset)
      : dtype_(dtype), numel_(numel), front_(kFront + offset * bytes_of(dtype)), bytes_(whole(), kCanary) {}

  static Elements random(DType dtype, int64_t numel, int64_t offset) {
    static std::array<std::string, kBytes.size()> pools;
    return drawn(pools, dtype, numel, offset, [dtype] { return random_element(dtype); });
  }

  // Ordinary numbers only: with NaN or infinity in them, most sums would say nothing of the rest.
  static Elements finite(DType dtype, int64_t numel, int64_t offset) {
    static std::array<std::string, kBytes.size()> pools;
    std::normal_distribution<float> normal;
    return drawn(pools, dtype, numel, offset, [&] {
      const float value = normal(random_bits);
      uint64_t bits = 0;
      kernels_scalar().cast(DType::f32, &value, dtype, &bits, 1);
      return bits;
    });
  }

  DType dtype() const { return dtype_; }
  int64_t numel() const { return numel_; }
  double number(int64_t element) const {
    double value = 0.0;
    kernels_scalar().cast(dtype_, at(element), DType::f64, &value, 1);
    return value;
  }
  char* at(int64_t element) { return bytes_.data() + front_ + element * bytes_of(dtype_); }
  const char* at(int64_t element) const { return bytes_.data() + front_ + element * bytes_of(dtype_); }
  void set(int64_t element, uint64_t bits) {
    std::memcpy(at(element), &bits, static_cast<size_t>(bytes_of(dtype_)));  // little-endian
  }
  uint64_t get(int64_t element) const {
    uint64_t bits = 0;
    std::memcpy(&bits, at(element), static_cast<size_t>(bytes_of(dtype_)));
    return bits;
  }

  void clear_masked(KeptBits kept) {
    for (int64_t i = 0; i < numel_; ++i) {
      if (!kept.at(i)) set(i, 0);
    }
  }
  void make_positive(int64_t element) { set(element, get(element) & ~sign()); }
  void make_zero(int64_t element, bool negative) { set(element, negative ? sign() : 0); }

  // Elements that differ. Arithmetic on two NaNs may return either: any NaN equals any other.
  int64_t differences(const Elements& other) const {
    const auto bytes = static_cast<size_t>(numel_ * bytes_of(dtype_));
    if (numel_ == other.numel_ && std::memcmp(at(0), other.at(0), bytes) == 0) return 0;
    int64_t count = 0;
    for (int64_t i = 0; i < numel_; ++i) {
      count += get(i) != other.get(i) && !(is_nan(i) && other.is_nan(i));
    }
    return count;
  }
  bool same_bytes(const Elements& other) const { return bytes_ == other.bytes_; }
  bool canaries_live() const {
    static const std::string canaries(kMostCanaries, kCanary);
    const auto untouched = [](const char* first, const char* last) {
      return std::string_view(first, last) == std::string_view(canaries).substr(0, static_cast<size_t>(last - first));
    };
    return untouched(bytes_.data(), at(0)) && untouched(at(numel_), bytes_.data() + bytes_.size());
  }

 private:
  static constexpr char kCanary = 0x5a;
  static constexpr int64_t kFront = 64;
  static constexpr size_t kInPool = 30'011;  // elements; a prime, so that no pattern of sizes meets it
  static constexpr size_t kMostCanaries = 256;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int64_t kBack = 0;
#else
  static constexpr int64_t kBack = 128;
#endif

  // From anywhere in a pool for each dtype: to draw each element anew took a quarter of the time of these tests.
  template <class Draw>
  static Elements drawn(std::array<std::string, kBytes.size()>& pools, DType dtype, int64_t numel, int64_t offset,
                        Draw draw) {
    const auto size = static_cast<size_t>(bytes_of(dtype));
    std::string& pool = pools[static_cast<size_t>(dtype)];
    while (pool.size() < kInPool * size) {
      const uint64_t bits = draw();
      pool.append(reinterpret_cast<const char*>(&bits), size);  // little-endian
    }
    Elements made(dtype, numel, offset);
    size_t from = random_bits() % kInPool;
    for (int64_t i = 0; i < numel; from = 0) {
      const size_t count = std::min(kInPool - from, static_cast<size_t>(numel - i));
      std::memcpy(made.at(i), pool.data() + from * size, count * size);
      i += static_cast<int64_t>(count);
    }
    return made;
  }

  uint64_t sign() const { return uint64_t{1} << (8 * bytes_of(dtype_) - 1); }
  size_t whole() const { return static_cast<size_t>(front_ + numel_ * bytes_of(dtype_) + kBack); }
  bool is_nan(int64_t element) const {
    const uint64_t bits = get(element);
    switch (dtype_) {
      case DType::f64:
        return (bits & 0x7fffffffffffffff) > 0x7ff0000000000000;
      case DType::f32:
        return (bits & 0x7fffffff) > 0x7f800000;
      case DType::bf16:
        return (bits & 0x7fff) > 0x7f80;
      case DType::f16:
        return (bits & 0x7fff) > 0x7c00;
    }
    return false;
  }

  DType dtype_;
  int64_t numel_;
  int64_t front_;
  std::vector<char> bytes_;
};

}  // namespace zx::testing
