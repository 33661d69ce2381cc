// The mean of what the ranks sent, with the norm's partials taken while the block is in cache. Included by
// kernels_<isa>.cpp only.

template <class T, class Wire>
void reduce_span(const ReduceSpan& span, int64_t* limbs) {
  Wire* shard = static_cast<Wire*>(span.shard);
  const T divisor = static_cast<T>(span.divisor);
  alignas(64) T rounded[kNormBlock];
  for (int64_t start = 0; start < span.numel; start += kNormBlock) {
    const int64_t count = span.numel - start < kNormBlock ? span.numel - start : kNormBlock;
    for_each_vector<T>(count, [&](auto lane, int64_t i) ZX_LAMBDA {
      using V = decltype(lane);
      V sum = V::load(static_cast<const Wire*>(span.slices[0]) + start + i);
      for (int64_t rank = 1; rank < span.num_slices; ++rank) {
        sum = sum + V::load(static_cast<const Wire*>(span.slices[rank]) + start + i);
      }
      V mean = span.by_inverse ? sum * V::splat(T(1) / divisor) : sum / V::splat(divisor);
      if (span.accumulate) mean = mean + V::load(shard + start + i);
      mean.store(shard + start + i);
      if constexpr (!std::is_same_v<T, Wire>) V::load(shard + start + i).store(rounded + i);
    });
    const T* stored = rounded;
    if constexpr (std::is_same_v<T, Wire>) stored = shard + start;
    exact_add(limbs, norm_partial<true>(stored, count, limbs + kExactNonFinite));
  }
}

void reduce(const ReduceSpan& span, int64_t* limbs) {
  switch (span.dtype) {
    case DType::f64:
      return reduce_span<double, double>(span, limbs);
    case DType::f32:
      return reduce_span<float, float>(span, limbs);
    case DType::bf16:
      return reduce_span<float, bf16>(span, limbs);
    case DType::f16:
      return reduce_span<float, f16>(span, limbs);
  }
}
