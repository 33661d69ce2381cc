// The update: one pass from gradient to states, master and parameter, by any rule (math/rule.h). Included by
// kernels_<isa>.cpp only.

// These know where a parameter's exact value lies. They load and store it as a vector in the type of the arithmetic.
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

template <class V, class Grad>
ZX_HD V load_grad(const Grad* grad, int64_t i) {
  return V::load(grad + i);
}
// Whether `Rule` has kernels that look up dtypes at every load and store: slow, but there is a tenth of the code to
// compile. For sanitizers' builds, see CMakeLists.txt.
#if !defined(ZX_LOOKS_UP_DTYPES)
#define ZX_LOOKS_UP_DTYPES false
#endif

// Loads and stores that look up the dtype are not inlined, so that all kernels share them.
struct AnyGrad {
  const void* grad;
  DType dtype;
};
template <class V>
__attribute__((noinline)) V load_grad(const AnyGrad* any, int64_t i) {
  switch (any->dtype) {
    case DType::f64:
      if constexpr (std::is_same_v<typename V::Scalar, double>) {
        return V::load(static_cast<const double*>(any->grad) + i);
      }
      break;
    case DType::f32:
      return V::load(static_cast<const float*>(any->grad) + i);
    case DType::bf16:
      return V::load(static_cast<const bf16*>(any->grad) + i);
    case DType::f16:
      return V::load(static_cast<const f16*>(any->grad) + i);
  }
  __builtin_unreachable();
}

// Any parameter that is updated in float.
struct AnyParam {
  void* param;
  void* master;
  DType dtype;
  Master kind;

  template <class V>
  __attribute__((noinline)) V load(int64_t i) const {
    V value;
    as_what_it_is([&](auto where) ZX_LAMBDA { value = where.template load<V>(i); });
    return value;
  }
  template <class V>
  __attribute__((noinline)) void store(V value, int64_t i) const {
    as_what_it_is([&](auto where) ZX_LAMBDA { where.store(value, i); });
  }

 private:
  template <class Body>
  ZX_HD void as_what_it_is(const Body& body) const;
};

// Rule::update(). Vectors of floats divide less, if the rule can. Other parameters than fp32 ones keep the core busy
// enough with their conversions: there, products in place of a division took longer.
template <class Rule, class Where, class V, int N, class Step>
ZX_HD void update_lanes(const Step& step, V grad, Lanes<V, N>& lanes) {
  if constexpr (Rule::kHasUncheckedStep && std::is_same_v<Where, PlainParam<float>> && std::is_same_v<V, VecF> &&
                VecF::kLanes > 1) {
    Rule::update_states(step, grad, lanes);
    lanes.param = step.is.ordinary ? V(Rule::new_param_by_inverse(step, lanes)) : V(Rule::new_param(step, lanes));
  } else {
    Rule::update(step, grad, lanes);
  }
}

// `state` counts from element `first` of the span.
template <class Rule, class T, int N, class Where, class State, class Grad>
ZX_HD void update_loop(const typename Rule::template Step<T>& step, Where where, State& state, const Grad* grad,
                       KeptBits kept, int64_t first, int64_t numel) {
  const KeptBits own = kept.from(first);
  for_each_vector<T>(numel, [&](auto lane, int64_t i) ZX_LAMBDA {
    using V = decltype(lane);
    Lanes<V, N> lanes{where.template load<V>(first + i), {}};
    state.load(lanes, i);
    update_lanes<Rule, Where>(step, load_grad<V>(grad, first + i), lanes);
    if (!own.has_all()) {
      const Kept<V> keep(own, i);
      lanes.param = keep(lanes.param);
      keep_states(lanes, keep);
    }
    where.store(lanes.param, first + i);
    state.store(lanes, i);
  });
}

// The states of an update, and then the parameter: between the two, states can be stored while roots and quotients are
// computed.
template <class Rule, class V, int N, class Step>
ZX_HD void update_states(const Step& step, V grad, Lanes<V, N>& lanes) {
  if constexpr (Rule::kHasUncheckedStep) {
    Rule::update_states(step, grad, lanes);
  } else {
    Rule::update(step, grad, lanes);
  }
}
template <class Rule, class V, int N, class Step>
ZX_HD V new_param(const Step& step, const Lanes<V, N>& lanes) {
  if constexpr (Rule::kHasUncheckedStep) {
    return Rule::new_param(step, lanes);
  } else {
    return lanes.param;
  }
}

#if defined(ZX_HAS_VECTORS)
// kCount vectors whose states are stored in bf16. Rounding takes as long as the rest of an update, but not the unit
// that divides: in one loop with the update, and in groups whose vectors don't wait for each other, they overlap.
// `state` and `kept` count from element `first` of the span. `Keep` is KeptBeside16Bits or AllBeside16Bits: a
// branch on the mask in here would take up to a fifth of the time.
template <class Rule, int N, template <class> class Keep, int kCount, class Where, class Grad>
ZX_HD void update_group(const typename Rule::template Step<float>& step, Where where, const Bf16State<Rule, N>& state,
                        const Grad* grad, KeptBits kept, int64_t first, int64_t i) {
  VecI random[kCount];
  fill_random(state.first, state.second, state.element + static_cast<uint32_t>(i), random);
  Lanes<VecF, N> lanes[kCount];
  Keep<VecF> keep[kCount];
  for (int v = 0; v < kCount; ++v) keep[v] = Keep<VecF>(kept, i + v * VecF::kLanes);
  for (int v = 0; v < kCount; ++v) {
    const int64_t at = i + v * VecF::kLanes;
    lanes[v].param = where.template load<VecF>(first + at);
    state.load(lanes[v], at);
    update_states<Rule>(step, load_grad<VecF>(grad, first + at), lanes[v]);
    state.store(lanes[v], random[v], at, keep[v]);
  }
  for (int v = 0; v < kCount; ++v) {
    where.store(keep[v](new_param<Rule>(step, lanes[v])), first + i + v * VecF::kLanes);
  }
}
#endif

// `state` and `kept` count from element `first` of the span.
template <class Rule, int N, template <class> class Keep, class Where, class Grad>
ZX_HD void update_bf16(const typename Rule::template Step<float>& step, Where where, const Bf16State<Rule, N>& state,
                       const Grad* grad, KeptBits kept, int64_t first, int64_t numel) {
  int64_t i = 0;
#if defined(ZX_HAS_VECTORS)
  constexpr int kMany = 4;
  for (; i + kMany * VecF::kLanes <= numel; i += kMany * VecF::kLanes) {
    update_group<Rule, N, Keep, kMany>(step, where, state, grad, kept, first, i);
  }
  for (; i + VecF::kLanes <= numel; i += VecF::kLanes) {
    update_group<Rule, N, Keep, 1>(step, where, state, grad, kept, first, i);
  }
#endif
  for (; i < numel; ++i) {
    using Lane = ScalarLane<float>;
    Lanes<Lane, N> lane{where.template load<Lane>(first + i), {}};
    state.load(lane, i);
    Rule::update(step, load_grad<Lane>(grad, first + i), lane);
    const uint32_t element = state.element + static_cast<uint32_t>(i);
    const uint32_t random = mix32(mix32(element ^ state.first) ^ state.second);
    const Keep<Lane> keep(kept, i);
    where.store(keep(lane.param), first + i);
    state.store(lane, random, i, keep);
  }
}

// A span, and what the instruction set in use has for it.
struct Call {
  const UpdateSpan& span;
  const Decoders& decoders;
};

// Updates with N states. Without any, it makes no difference how they would be stored. `step` is a copy, which no store
// into an array can change: its constants stay in registers.
template <class Rule, class T, int N, class Where, class Grad>
ZX_HD void update_state(const Call& call, const typename Rule::template Step<T> step, Where where, const Grad* grad) {
  const UpdateSpan& span = call.span;
  if constexpr (N > 0 && std::is_same_v<T, float>) {
    if (span.states.kind == StateKind::bf16) {
      for (int64_t first = 0; first < span.numel;) {
        const int64_t alike = (int64_t{1} << 32) - static_cast<uint32_t>(span.random.param_start + first);
        const int64_t numel = alike < span.numel - first ? alike : span.numel - first;
        const Bf16State<Rule, N> state(span, first);
        if (span.kept.has_all()) {
          update_bf16<Rule, N, AllBeside16Bits>(step, where, state, grad, span.kept, first, numel);
        } else {
          update_bf16<Rule, N, KeptBeside16Bits>(step, where, state, grad, span.kept.from(first), first, numel);
        }
        first += numel;
      }
      return;
    }
    if (span.states.kind == StateKind::blockwise) {
      for_each_part(span.numel, kChunk, [&](int64_t first, int64_t numel) ZX_LAMBDA {
        // A chunk has one line of a mask: too few for the processor to fetch them ahead by itself.
        const KeptBits ahead = span.kept.from(first + 4 * kChunk);
        if (!ahead.has_all()) __builtin_prefetch(ahead.bits + ahead.first / 8);
        CodedChunks<Rule, N> chunks(span, call.decoders, first, numel);
        for_each_part(numel, kStateBlock, [&](int64_t start, int64_t count) ZX_LAMBDA {
          CodedBlock<Rule, N> block(chunks, start);
          update_loop<Rule, T, N>(step, where, block, grad, span.kept, first + start, count);
          block.put_keys(chunks, start / kStateBlock);
        });
        chunks.encode(numel);
      });
      return;
    }
  }
  WideState<T, N> state(span);
  update_loop<Rule, T, N>(step, where, state, grad, span.kept, 0, span.numel);
}

template <class Rule>
using DoubleStep = typename Rule::template Step<double>;

template <class Rule, class T, class Where, class Grad>
void update_num_states(const Call& call, const DoubleStep<Rule>& step, Where where, const Grad* grad) {
  const typename Rule::template Step<T> narrowed = Rule::template narrow<T>(step);
  with_num_states(first_states<Rule>(call.span.num_states), [&](auto count) ZX_LAMBDA {
    update_state<Rule, T, decltype(count)::value>(call, narrowed, where, grad);
  });
}

template <class Rule, class T, class Where>
void update_grad(const Call& call, const DoubleStep<Rule>& step, Where where) {
  const UpdateSpan& span = call.span;
  if constexpr (ZX_LOOKS_UP_DTYPES) {
    const AnyGrad any{span.grad, span.grad_dtype};
    return update_num_states<Rule, T>(call, step, where, &any);
  } else {
    switch (span.grad_dtype) {
      case DType::f64:
        if constexpr (std::is_same_v<T, double>) {
          return update_num_states<Rule, T>(call, step, where, static_cast<const double*>(span.grad));
        }
        break;  // refused at the door: 16- and 32-bit parameters have no fp64 gradients
      case DType::f32:
        return update_num_states<Rule, T>(call, step, where, static_cast<const float*>(span.grad));
      case DType::bf16:
        return update_num_states<Rule, T>(call, step, where, static_cast<const bf16*>(span.grad));
      case DType::f16:
        return update_num_states<Rule, T>(call, step, where, static_cast<const f16*>(span.grad));
    }
  }
}

// Calls body with where the exact value of a parameter lies that is updated in float.
template <class Half, class Body>
ZX_HD void with_half(void* param, Master kind, void* master, const Body& body) {
  Half* half = static_cast<Half*>(param);
  if (kind == Master::fp32) return body(MasteredParam<Half>{half, static_cast<float*>(master)});
  if constexpr (std::is_same_v<Half, bf16>) {
    if (kind == Master::remainder) return body(SplitParam{half, static_cast<int16_t*>(master)});
  }
  body(PlainParam<Half>{half});
}
template <class Body>
ZX_HD void with_param(DType dtype, void* param, Master kind, void* master, const Body& body) {
  switch (dtype) {
    case DType::f64:
      break;
    case DType::f32:
      return body(PlainParam<float>{static_cast<float*>(param)});
    case DType::bf16:
      return with_half<bf16>(param, kind, master, body);
    case DType::f16:
      return with_half<f16>(param, kind, master, body);
  }
  __builtin_unreachable();
}

template <class Body>
ZX_HD void AnyParam::as_what_it_is(const Body& body) const {
  with_param(dtype, param, kind, master, body);
}

template <class Rule>
void update_param(const Call& call, const DoubleStep<Rule>& step) {
  const UpdateSpan& span = call.span;
  if (span.param_dtype == DType::f64) {
    return update_grad<Rule, double>(call, step, PlainParam<double>{static_cast<double*>(span.param)});
  }
  if constexpr (ZX_LOOKS_UP_DTYPES) {
    update_grad<Rule, float>(call, step, AnyParam{span.param, span.master, span.param_dtype, span.master_kind});
  } else {
    with_param(span.param_dtype, span.param, span.master_kind, span.master,
               [&](auto where) ZX_LAMBDA { update_grad<Rule, float>(call, step, where); });
  }
}

void update_by(const Call& call, const void* step) {
  with_rule(call.span.rule, [&](auto type) {
    using Rule = typename decltype(type)::type;
    update_param<Rule>(call, *static_cast<const DoubleStep<Rule>*>(step));
  });
}

void update(const UpdateSpan& span, const void* step) { update_by({span, kDecoders}, step); }
