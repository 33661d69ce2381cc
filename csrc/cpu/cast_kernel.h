// Copies with conversion: the element loop of the fused flatten. Included by kernels_<isa>.cpp only.

template <class T, class From, class To>
ZX_HD void cast_loop(const From* source, To* target, int64_t numel) {
  for_each_vector<T>(numel, [&](auto lane, int64_t i) ZX_LAMBDA {
    using V = decltype(lane);
    V::load(source + i).store(target + i);
  });
}

template <class From>
void cast_from(const From* source, DType to, void* target, int64_t numel) {
  // Goes through double only if one end is double; 16 to 16 bits goes through float, as in torch's copy_.
  using Between = std::conditional_t<std::is_same_v<From, double>, double, float>;
  switch (to) {
    case DType::f64:
      return cast_loop<double>(source, static_cast<double*>(target), numel);
    case DType::f32:
      return cast_loop<Between>(source, static_cast<float*>(target), numel);
    case DType::bf16:
      return cast_loop<Between>(source, static_cast<bf16*>(target), numel);
    case DType::f16:
      return cast_loop<Between>(source, static_cast<f16*>(target), numel);
  }
}

void cast(DType from, const void* source, DType to, void* target, int64_t numel) {
  if (numel == 0) return;
  if (from == to) {
    std::memcpy(target, source, static_cast<size_t>(numel * width_of(from)));
    return;
  }
  switch (from) {
    case DType::f64:
      return cast_from(static_cast<const double*>(source), to, target, numel);
    case DType::f32:
      return cast_from(static_cast<const float*>(source), to, target, numel);
    case DType::bf16:
      return cast_from(static_cast<const bf16*>(source), to, target, numel);
    case DType::f16:
      return cast_from(static_cast<const f16*>(source), to, target, numel);
  }
}
