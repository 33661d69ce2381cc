// Norm partials over blocks of 256 elements. Included by kernels_<isa>.cpp only.

// Sums in the order of kNormAccumulators, which no instruction set changes. Adds 1 to `count_non_finite` if any element
// is NaN or infinite. A sum of floats tells that; a sum of doubles may overflow while every element is finite.
template <bool kSquare, class T>
ZX_HD double norm_partial(const T* values, int64_t numel, int64_t* count_non_finite) {
  constexpr int kVectors = kNormAccumulators / VecD::kLanes;
  const VecD zero = VecD::splat(0.0);
  VecD vector_sums[kVectors];
  VecD vector_differences[kVectors];  // x - x is 0, or NaN if x is not finite
  for (int v = 0; v < kVectors; ++v) vector_sums[v] = vector_differences[v] = zero;
  int64_t i = 0;
  for (; i + kNormAccumulators <= numel; i += kNormAccumulators) {
    for (int v = 0; v < kVectors; ++v) {
      const VecD x = VecD::load(values + i + v * VecD::kLanes);
      vector_sums[v] = vector_sums[v] + (kSquare ? x * x : max(x, zero - x));
      if constexpr (std::is_same_v<T, double>) vector_differences[v] = vector_differences[v] + (x - x);
    }
  }
  alignas(64) double sums[kNormAccumulators];
  alignas(64) double differences[kNormAccumulators];
  for (int v = 0; v < kVectors; ++v) {
    vector_sums[v].store(sums + v * VecD::kLanes);
    vector_differences[v].store(differences + v * VecD::kLanes);
  }
  for (int lane = 0; i < numel; ++i, ++lane) {
    const double x = static_cast<double>(values[i]);
    sums[lane] += kSquare ? x * x : std::fabs(x);
    differences[lane] += x - x;
  }
  for (int half = kNormAccumulators / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      sums[lane] += sums[lane + half];
      differences[lane] += differences[lane + half];
    }
  }
  const double tell = std::is_same_v<T, double> ? differences[0] : sums[0] - sums[0];
  *count_non_finite += tell == 0.0 ? 0 : 1;
  return sums[0];
}

// The largest |element| as the bits of a double: among numbers that are not negative these order as integers, with
// infinity and then NaN on top, so one integer maximum over lanes, blocks and ranks keeps all three apart.
template <class T>
ZX_HD int64_t max_partial(const T* values, int64_t numel, int64_t largest) {
  for (int64_t i = 0; i < numel; ++i) {
    const int64_t bits = std::bit_cast<int64_t>(std::fabs(static_cast<double>(values[i])));
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Calls body(values, start, numel) on each block, as float or double.
template <class Body>
ZX_HD void for_each_norm_block(DType dtype, const void* values, int64_t numel, Body body) {
  float wide[kNormBlock];
  for (int64_t start = 0; start < numel; start += kNormBlock) {
    const int64_t count = numel - start < kNormBlock ? numel - start : kNormBlock;
    switch (dtype) {
      case DType::f64:
        body(static_cast<const double*>(values) + start, start, count);
        break;
      case DType::f32:
        body(static_cast<const float*>(values) + start, start, count);
        break;
      case DType::bf16:
        cast_loop<float>(static_cast<const bf16*>(values) + start, wide, count);
        body(static_cast<const float*>(wide), start, count);
        break;
      case DType::f16:
        cast_loop<float>(static_cast<const f16*>(values) + start, wide, count);
        body(static_cast<const float*>(wide), start, count);
        break;
    }
  }
}

void norm(Norm kind, DType dtype, const void* values, int64_t numel, KeptBits kept, int64_t* limbs) {
  for_each_norm_block(dtype, values, numel, [&](auto block, int64_t start, int64_t count) ZX_LAMBDA {
    using T = std::remove_cvref_t<decltype(*block)>;
    alignas(64) T counted[kNormBlock];
    if (!kept.has_all()) {
      for_each_vector<T>(count, [&](auto lane, int64_t i) ZX_LAMBDA {
        Kept<decltype(lane)>(kept.from(start), i)(decltype(lane)::load(block + i)).store(counted + i);
      });
      block = counted;
    }
    switch (kind) {
      case Norm::sum_of_abs:
        exact_add(limbs, norm_partial<false>(block, count, limbs + kExactNonFinite));
        break;
      case Norm::sum_of_squares:
        exact_add(limbs, norm_partial<true>(block, count, limbs + kExactNonFinite));
        break;
      case Norm::max_of_abs:
        limbs[0] = max_partial(block, count, limbs[0]);
        break;
      case Norm::sum_of_powers:  // not here: see norm.cpp
        break;
    }
  });
}
