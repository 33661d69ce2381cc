// One pass from gradient to moments, master and parameter. Included by kernels_<isa>.cpp only.

// Where a parameter's exact value lies: load and store it as a vector of the type that is computed in.
template <class Param>
struct PlainParam {
  Param* param;
  template <class V>
  ZX_HD V load(int64_t i) const {
    return V::load(param + i);
  }
  template <class V>
  ZX_HD void store(V value, int64_t i) const {
    value.store(param + i);
  }
};
struct SplitParam {
  bf16* param;
  int16_t* remainder;
  template <class V>
  ZX_HD V load(int64_t i) const {
    return V::load_split(param + i, remainder + i);
  }
  template <class V>
  ZX_HD void store(V value, int64_t i) const {
    value.store_split(param + i, remainder + i);
  }
};
template <class Half>
struct MasteredParam {
  Half* param;
  float* master;
  template <class V>
  ZX_HD V load(int64_t i) const {
    return V::load_master(param + i, master + i);
  }
  template <class V>
  ZX_HD void store(V value, int64_t i) const {
    value.store(master + i);
    value.store(param + i);
  }
};

// `moments` counts from element `first` of the span.
template <class T, bool kAmsgrad, class Where, class Moments, class Grad>
ZX_HD void adam_loop(const AdamStep<T>& step, Where where, Moments& moments, const Grad* grad, int64_t first,
                     int64_t numel) {
  for_each_vector<T>(numel, [&](auto lane, int64_t i) ZX_LAMBDA {
    using V = decltype(lane);
    AdamLanes<V> at{where.template load<V>(first + i), V{}, V{}, V{}};
    moments.template load<kAmsgrad>(at, i);
    adam_update<kAmsgrad>(step, V::load(grad + first + i), at);
    where.store(at.param, first + i);
    moments.template store<kAmsgrad>(at, i);
  });
}

template <class T, bool kAmsgrad, class Where, class Grad>
ZX_HD void adam_state(const AdamSpan& span, const AdamStep<T>& step, Where where, const Grad* grad) {
  if constexpr (std::is_same_v<T, float>) {
    if (span.moments.kind == StateKind::bf16) {
      Bf16Moments moments(span);
      return adam_loop<T, kAmsgrad>(step, where, moments, grad, 0, span.numel);
    }
    if (span.moments.kind == StateKind::blockwise) {
      BlockMoments moments;
      for (int64_t first = 0; first < span.numel; first += kMomentBlock) {
        const int64_t numel = span.numel - first < kMomentBlock ? span.numel - first : kMomentBlock;
        moments.open<kAmsgrad>(span.moments, first);
        adam_loop<T, kAmsgrad>(step, where, moments, grad, first, numel);
        moments.close<kAmsgrad>(numel);
      }
      return;
    }
  }
  WideMoments<T> moments(span);
  adam_loop<T, kAmsgrad>(step, where, moments, grad, 0, span.numel);
}

template <class T, class Where, class Grad>
void adam_amsgrad(const AdamSpan& span, const AdamStep<double>& step, Where where, const Grad* grad) {
  const AdamStep<T> narrowed = narrow<T>(step);
  if (span.amsgrad) {
    adam_state<T, true>(span, narrowed, where, grad);
  } else {
    adam_state<T, false>(span, narrowed, where, grad);
  }
}

template <class T, class Where>
void adam_grad(const AdamSpan& span, const AdamStep<double>& step, Where where) {
  switch (span.grad_dtype) {
    case DType::f64:
      if constexpr (std::is_same_v<T, double>) {
        return adam_amsgrad<T>(span, step, where, static_cast<const double*>(span.grad));
      }
      break;  // refused at the door: 16- and 32-bit parameters have no fp64 gradients
    case DType::f32:
      return adam_amsgrad<T>(span, step, where, static_cast<const float*>(span.grad));
    case DType::bf16:
      return adam_amsgrad<T>(span, step, where, static_cast<const bf16*>(span.grad));
    case DType::f16:
      return adam_amsgrad<T>(span, step, where, static_cast<const f16*>(span.grad));
  }
}

template <class Half>
void adam_half(const AdamSpan& span, const AdamStep<double>& step) {
  Half* param = static_cast<Half*>(span.param);
  if (span.master_kind == Master::fp32) {
    return adam_grad<float>(span, step, MasteredParam<Half>{param, static_cast<float*>(span.master)});
  }
  if constexpr (std::is_same_v<Half, bf16>) {
    if (span.master_kind == Master::remainder) {
      return adam_grad<float>(span, step, SplitParam{param, static_cast<int16_t*>(span.master)});
    }
  }
  adam_grad<float>(span, step, PlainParam<Half>{param});
}

void adam(const AdamSpan& span, const AdamStep<double>& step) {
  switch (span.param_dtype) {
    case DType::f64:
      return adam_grad<double>(span, step, PlainParam<double>{static_cast<double*>(span.param)});
    case DType::f32:
      return adam_grad<float>(span, step, PlainParam<float>{static_cast<float*>(span.param)});
    case DType::bf16:
      return adam_half<bf16>(span, step);
    case DType::f16:
      return adam_half<f16>(span, step);
  }
}
