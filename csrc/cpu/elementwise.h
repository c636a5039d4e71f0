// Pointwise functions and gated activations. Included by isa.h.

template <class Body>
void by_activation(Function function, Body body) {
  switch (function) {
    case Function::silu: return body(Silu{});
    case Function::gelu: return body(Gelu{});
    case Function::gelu_tanh: return body(GeluTanh{});
    case Function::relu: return body(Relu{});
    case Function::identity: return body(Identity{});
    default: return;
  }
}

template <class Body>
void by_function(Function function, Body body) {
  switch (function) {
    case Function::sigmoid: return body(Sigmoid{});
    case Function::tanh: return body(Tanh{});
    case Function::exp: return body(Exp{});
    case Function::log: return body(Log{});
    case Function::sqrt: return body(Sqrt{});
    case Function::rsqrt: return body(Rsqrt{});
    case Function::reciprocal: return body(Reciprocal{});
    case Function::square: return body(Square{});
    case Function::sin: return body(Sin{});
    case Function::cos: return body(Cos{});
    case Function::erf: return body(Erf{});
    case Function::abs: return body(Abs{});
    case Function::sigmoid_result: return body(SigmoidResult{});
    case Function::tanh_result: return body(TanhResult{});
    case Function::exp_result: return body(ExpResult{});
    case Function::sqrt_result: return body(SqrtResult{});
    case Function::rsqrt_result: return body(RsqrtResult{});
    case Function::reciprocal_result: return body(ReciprocalResult{});
    default: return by_activation(function, body);
  }
}

// Cut the elements [begin, end) at the ends of rows: body(row, column, count).
template <class Body>
void by_pieces(int64_t width, int64_t begin, int64_t end, Body body) {
  while (begin < end) {
    const int64_t column = begin % width;
    const int64_t rest = width - column, left = end - begin;
    const int64_t count = rest < left ? rest : left;
    body(begin / width, column, count);
    begin += count;
  }
}

template <class F, class T, bool Dual>
void pointwise_piece(Line<T> x, Line<T> y, int64_t count) {
  using C = Computing<T>;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i)
    store<Dual>(y, i, stars::pointwise<F>(load(x.primal + i), Dual ? load(x.tangent + i) : C(0)));
}

void pointwise(const Pointwise& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto dual) {
    using T = decltype(type);
    by_function(p.function, [&](auto function) {
      by_pieces(p.width, begin, end, [&](int64_t row, int64_t column, int64_t count) {
        pointwise_piece<decltype(function), T, decltype(dual)::value>(
            line<T>(p.x, row, column), line<T>(p.y, row, column), count);
      });
    });
  });
}

template <class F, class T, bool Dual>
void pointwise_backward_piece(Line<T> grad, Line<T> x, Line<T> x_bar, int64_t count) {
  using C = Computing<T>;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const Pair<C> bar = cotangent<Dual>(grad, i);
    const C tangent = Dual ? load(x.tangent + i) : C(0);
    store_cotangent<Dual>(
        x_bar, i, stars::pointwise_backward<F>(bar.x, bar.xd, load(x.primal + i), tangent));
  }
}

void pointwise_backward(const PointwiseBackward& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto dual) {
    using T = decltype(type);
    by_function(p.function, [&](auto function) {
      by_pieces(p.width, begin, end, [&](int64_t row, int64_t column, int64_t count) {
        pointwise_backward_piece<decltype(function), T, decltype(dual)::value>(
            line<T>(p.grad, row, column), line<T>(p.x, row, column), line<T>(p.x_bar, row, column),
            count);
      });
    });
  });
}

template <class F, class T, bool Dual>
void gated_piece(Line<T> g, Line<T> u, Line<T> y, int64_t count) {
  using C = Computing<T>;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i)
    store<Dual>(y, i,
                stars::gated<F>(load(g.primal + i), Dual ? load(g.tangent + i) : C(0),
                                load(u.primal + i), Dual ? load(u.tangent + i) : C(0)));
}

void gated(const Gated& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto dual) {
    using T = decltype(type);
    by_activation(p.function, [&](auto function) {
      by_pieces(p.width, begin, end, [&](int64_t row, int64_t column, int64_t count) {
        gated_piece<decltype(function), T, decltype(dual)::value>(
            line<T>(p.g, row, column), line<T>(p.u, row, column), line<T>(p.y, row, column), count);
      });
    });
  });
}

template <class F, class T, bool Dual>
void gated_backward_piece(Line<T> grad, Line<T> g, Line<T> u, Line<T> g_bar, Line<T> u_bar,
                          int64_t count) {
  using C = Computing<T>;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const Pair<C> bar = cotangent<Dual>(grad, i);
    const GatedBar<C> out = stars::gated_backward<F>(
        bar.x, bar.xd, load(g.primal + i), Dual ? load(g.tangent + i) : C(0), load(u.primal + i),
        Dual ? load(u.tangent + i) : C(0));
    // Entry by entry: GCC does not vectorise past the copy of an inner struct.
    store_cotangent<Dual>(g_bar, i, Pair<C>{out.g.x, out.g.xd});
    store_cotangent<Dual>(u_bar, i, Pair<C>{out.u.x, out.u.xd});
  }
}

void gated_backward(const GatedBackward& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto dual) {
    using T = decltype(type);
    by_activation(p.function, [&](auto function) {
      by_pieces(p.width, begin, end, [&](int64_t row, int64_t column, int64_t count) {
        gated_backward_piece<decltype(function), T, decltype(dual)::value>(
            line<T>(p.grad, row, column), line<T>(p.g, row, column), line<T>(p.u, row, column),
            line<T>(p.g_bar, row, column), line<T>(p.u_bar, row, column), count);
      });
    });
  });
}
