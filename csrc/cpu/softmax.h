// Softmax over rows, and the same between the two products of attention. Included by isa.h.

// e: scratch [width]. x and y may be the same. `empty` rows, all -inf, give 0; NaN otherwise.
template <class C, class T, bool Dual>
void softmax_row(Line<T> x, Line<T> y, C* e, int64_t width, bool empty) {
  C top = -std::numeric_limits<C>::infinity();
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < width; ++i) {
    const C v = load(x.primal + i);
    top = v > top ? v : top;
  }
  if (empty && top == -std::numeric_limits<C>::infinity()) top = 0;
  C total = 0, mu = 0;
#pragma omp simd reduction(+ : total, mu)
  for (int64_t i = 0; i < width; ++i) {
    e[i] = exp(load(x.primal + i) - top);
    total += e[i];
    if constexpr (Dual) mu += e[i] * load(x.tangent + i);
  }
  const C scale = empty && total == 0 ? C(0) : C(1) / total;
  mu *= scale;
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const C weight = e[i] * scale;
    store<Dual>(y, i, Pair<C>{weight, Dual ? weight * (load(x.tangent + i) - mu) : C(0)});
  }
}

template <class C, class T, bool Dual>
void softmax_backward_row(Line<T> grad, Line<T> y, Line<T> x_bar, int64_t width) {
  C d = 0, dd = 0;
#pragma omp simd reduction(+ : d, dd)
  for (int64_t i = 0; i < width; ++i) {
    const Pair<C> g = cotangent<Dual>(grad, i);
    const C v = load(y.primal + i);
    d += v * g.xd;
    if constexpr (Dual) dd += v * g.x + load(y.tangent + i) * g.xd;
  }
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const Pair<C> g = cotangent<Dual>(grad, i), v = value<Dual>(y, i);
    store_cotangent<Dual>(x_bar, i, stars::softmax_backward<C>(g.x, g.xd, v.x, v.xd, d, dd));
  }
}

void softmax(const Softmax& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto dual) {
    using T = decltype(type);
    using C = Computing<T>;
    const Scratch<C> e(p.width);
    for (int64_t row = begin; row < end; ++row)
      softmax_row<C, T, decltype(dual)::value>(line<T>(p.x, row), line<T>(p.y, row), e.data, p.width,
                                               false);
  });
}

void softmax_backward(const SoftmaxBackward& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto dual) {
    using T = decltype(type);
    for (int64_t row = begin; row < end; ++row)
      softmax_backward_row<Computing<T>, T, decltype(dual)::value>(
          line<T>(p.grad, row), line<T>(p.y, row), line<T>(p.x_bar, row), p.width);
  });
}

struct Span {
  int64_t begin, end;
};

inline Span span_of(const Spans& p, int64_t row, int64_t width) {
  const int64_t batch = row / (p.heads * p.queries), query = row % p.queries;
  const int32_t* bounds = p.data + batch * p.batch + 2 * query;
  const int64_t begin = bounds[0] > 0 ? bounds[0] : 0;
  const int64_t end = bounds[1] < width ? bounds[1] : width;
  return end > begin ? Span{begin, end} : Span{0, 0};
}

// Primal and tangent from two tensors.
template <class T>
Line<T> line(const Rows& primal, const Rows& tangent, int64_t row) {
  return {line<T>(primal, row).primal, line<T>(tangent, row).primal};
}

template <class T>
Line<T> from(Line<T> x, int64_t column) {
  return {x.primal + column, x.tangent + column};
}

template <class T>
void zero_outside(Line<T> x, Span span, int64_t width) {
  for (T* part : {x.primal, x.tangent}) {
    std::memset(static_cast<void*>(part), 0, span.begin * sizeof(T));
    std::memset(static_cast<void*>(part + span.end), 0, (width - span.end) * sizeof(T));
  }
}

void attention_weights(const AttentionWeights& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto) {
    using T = decltype(type);
    using C = Computing<T>;
    const Scratch<C> e(p.width);
    for (int64_t row = begin; row < end; ++row) {
      const Span span = span_of(p.spans, row, p.width);
      const Line<T> whole = line<T>(p.s, p.s_dot, row), inside = from(whole, span.begin);
      softmax_row<C, T, true>(inside, inside, e.data, span.end - span.begin, true);
      zero_outside(whole, span, p.width);
    }
  });
}

void attention_weights_backward(const AttentionWeightsBackward& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto) {
    using T = decltype(type);
    for (int64_t row = begin; row < end; ++row) {
      const Span span = span_of(p.spans, row, p.width);
      const Line<T> whole = line<T>(p.dp, p.dp_dot, row), inside = from(whole, span.begin);
      softmax_backward_row<Computing<T>, T, true>(
          inside, from(line<T>(p.p, p.p_dot, row), span.begin), inside, span.end - span.begin);
      zero_outside(whole, span, p.width);
    }
  });
}
