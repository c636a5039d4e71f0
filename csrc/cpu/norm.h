// RMSNorm, LayerNorm, and the sandwich of two norms around the residual stream. Included by isa.h.
// A row is read three times while it lies in the cache: once from memory.

template <class C>
struct Statistics {
  Pair<C> mean;  // of the pair; 0 without centring
  Coefficients<C> k;
};

template <class C, class T, bool Dual>
Statistics<C> statistics(Line<T> x, int64_t width, C eps, bool centre) {
  C sum = 0, sum_dot = 0;
  if (centre) {
#pragma omp simd reduction(+ : sum, sum_dot)
    for (int64_t i = 0; i < width; ++i) {
      sum += load(x.primal + i);
      if constexpr (Dual) sum_dot += load(x.tangent + i);
    }
  }
  const Pair<C> mean = {sum / width, sum_dot / width};
  C xx = 0, xxd = 0;
#pragma omp simd reduction(+ : xx, xxd)
  for (int64_t i = 0; i < width; ++i) {
    const C v = load(x.primal + i) - mean.x;
    xx += v * v;
    if constexpr (Dual) xxd += v * (load(x.tangent + i) - mean.xd);
  }
  return {mean, coefficients<C>(xx, xxd, width, eps)};
}

template <class C, class T, bool Dual>
STARS_FN Pair<C> normalised(Line<T> x, int64_t i, const Statistics<C>& q) {
  const C tangent = Dual ? load(x.tangent + i) - q.mean.xd : C(0);
  return normalise<C>(load(x.primal + i) - q.mean.x, tangent, q.k.r, q.k.c);
}

void norm(const Norm& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto dual) {
    using T = decltype(type);
    using C = Computing<T>;
    constexpr bool Dual = decltype(dual)::value;
    const C* weight = static_cast<const C*>(p.weight);
    const C* bias = static_cast<const C*>(p.bias);
    for (int64_t row = begin; row < end; ++row) {
      const Line<T> x = line<T>(p.x, row), y = line<T>(p.y, row);
      const Statistics<C> q = statistics<C, T, Dual>(x, p.width, C(p.eps), p.centre);
#pragma omp simd
      for (int64_t i = 0; i < p.width; ++i) {
        const Pair<C> n = normalised<C, T, Dual>(x, i, q);
        store<Dual>(y, i, Pair<C>{weight[i] * n.x + bias[i], weight[i] * n.xd});
      }
    }
  });
}

// write(i, bar, bar_dot) gets the cotangent of x, weight_bar [width] is added to (null: not wanted).
template <class C, class G, class T, bool Dual, class Write>
void norm_backward_row(Line<G> grad, Line<T> x, const C* weight, C* weight_bar, int64_t width, C eps,
                       bool centre, Write write) {
  const Statistics<C> q = statistics<C, T, Dual>(x, width, eps, centre);
  C sum_a = 0, sum_b = 0, bx = 0, axbxd = 0;
#pragma omp simd reduction(+ : sum_a, sum_b, bx, axbxd)
  for (int64_t i = 0; i < width; ++i) {
    const Pair<C> g = cotangent<Dual>(grad, i);
    const C a = weight[i] * g.x, b = weight[i] * g.xd;
    const C v = load(x.primal + i) - q.mean.x;
    sum_a += a;
    sum_b += b;
    bx += b * v;
    if constexpr (Dual) axbxd += a * v + b * (load(x.tangent + i) - q.mean.xd);
  }
  const BackwardCoefficients<C> s = backward_coefficients<C>(bx, axbxd, width, q.k);
  const C mean_a = centre ? sum_a / width : C(0), mean_b = centre ? sum_b / width : C(0);
  const auto finish = [&](auto with_weight) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const Pair<C> g = cotangent<Dual>(grad, i);
      const Pair<C> n = normalised<C, T, Dual>(x, i, q);
      if constexpr (decltype(with_weight)::value)
        weight_bar[i] += Dual ? g.x * n.x + g.xd * n.xd : g.xd * n.x;
      // Entry by entry, as is the call of write: GCC does not vectorise past the copy of a struct.
      const Pair<C> bar =
          normalise_backward<C>(weight[i] * g.x - mean_a, weight[i] * g.xd - mean_b,
                                Pair<C>{n.x, n.xd}, q.k.r, q.k.c, s.s, s.sd);
      write(i, bar.x, bar.xd);
    }
  };
  weight_bar ? finish(True{}) : finish(False{});
}

// The part of a parameter gradient that the rows from `begin` add to, set to 0.
template <class C>
C* fresh_part(void* partials, int64_t begin, int64_t part, int64_t width) {
  if (!partials) return nullptr;
  C* out = static_cast<C*>(partials) + begin / part * width;
  for (int64_t i = 0; i < width; ++i) out[i] = 0;
  return out;
}

void norm_backward(const NormBackward& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto dual) {
    using T = decltype(type);
    using C = Computing<T>;
    constexpr bool Dual = decltype(dual)::value;
    C* weight_bar = fresh_part<C>(p.weight_bar, begin, p.part, p.width);
    C* bias_bar = fresh_part<C>(p.bias_bar, begin, p.part, p.width);
    for (int64_t row = begin; row < end; ++row) {
      const Line<T> grad = line<T>(p.grad, row), x_bar = line<T>(p.x_bar, row);
      norm_backward_row<C, T, T, Dual>(
          grad, line<T>(p.x, row), static_cast<const C*>(p.weight), weight_bar, p.width, C(p.eps),
          p.centre, [&](int64_t i, C bar, C bar_dot) STARS_INLINE {
            store_cotangent<Dual>(x_bar, i, Pair<C>{bar, bar_dot});
          });
      if (bias_bar) {
#pragma omp simd
        for (int64_t i = 0; i < p.width; ++i) bias_bar[i] += load(grad.primal + i);
      }
    }
  });
}

void sandwich(const Sandwich& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto dual) {
    using T = decltype(type);
    using C = Computing<T>;
    constexpr bool Dual = decltype(dual)::value;
    const C* weight_out = static_cast<const C*>(p.weight_out);
    const C* weight_in = static_cast<const C*>(p.weight_in);
    for (int64_t row = begin; row < end; ++row) {
      const Line<T> branch = line<T>(p.branch, row), residual = line<T>(p.residual, row);
      const Line<T> h = line<T>(p.h, row), x = line<T>(p.x, row);
      if (weight_out) {
        const Statistics<C> q = statistics<C, T, Dual>(branch, p.width, C(p.eps_out), false);
#pragma omp simd
        for (int64_t i = 0; i < p.width; ++i) {
          const Pair<C> n = normalised<C, T, Dual>(branch, i, q);
          const Pair<C> before = value<Dual>(residual, i);
          store<Dual>(h, i,
                      Pair<C>{before.x + weight_out[i] * n.x, before.xd + weight_out[i] * n.xd});
        }
      } else {
#pragma omp simd
        for (int64_t i = 0; i < p.width; ++i) {
          const Pair<C> v = value<Dual>(branch, i), before = value<Dual>(residual, i);
          store<Dual>(h, i, Pair<C>{before.x + v.x, before.xd + v.xd});
        }
      }
      const Statistics<C> q = statistics<C, T, Dual>(h, p.width, C(p.eps_in), false);
#pragma omp simd
      for (int64_t i = 0; i < p.width; ++i) {
        const Pair<C> n = normalised<C, T, Dual>(h, i, q);
        store<Dual>(x, i, Pair<C>{weight_in[i] * n.x, weight_in[i] * n.xd});
      }
    }
  });
}

void sandwich_backward(const SandwichBackward& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto dual) {
    using T = decltype(type);
    using C = Computing<T>;
    constexpr bool Dual = decltype(dual)::value;
    const C* weight_out = static_cast<const C*>(p.weight_out);
    C* out_bar = fresh_part<C>(weight_out ? p.out_bar : nullptr, begin, p.part, p.width);
    C* in_bar = fresh_part<C>(p.in_bar, begin, p.part, p.width);
    // The cotangent of h, unrounded.
    const Scratch<C> scratch(2 * p.width);
    const Line<C> total = {scratch.data, scratch.data + p.width};
    for (int64_t row = begin; row < end; ++row) {
      const Line<T> h_bar = line<T>(p.h_bar, row), residual_bar = line<T>(p.residual_bar, row);
      norm_backward_row<C, T, T, Dual>(
          line<T>(p.x_bar, row), line<T>(p.h, row), static_cast<const C*>(p.weight_in), in_bar,
          p.width, C(p.eps_in), false, [&](int64_t i, C bar, C bar_dot) STARS_INLINE {
            const Pair<C> direct = cotangent<Dual>(h_bar, i);
            const C sum = direct.x + bar, sum_dot = direct.xd + bar_dot;
            store_cotangent<Dual>(total, i, Pair<C>{sum, sum_dot});
            store_cotangent<Dual>(residual_bar, i, Pair<C>{sum, sum_dot});
          });
      if (!weight_out) continue;
      const Line<T> branch_bar = line<T>(p.branch_bar, row);
      norm_backward_row<C, C, T, Dual>(
          total, line<T>(p.branch, row), weight_out, out_bar, p.width, C(p.eps_out), false,
          [&](int64_t i, C bar, C bar_dot) STARS_INLINE {
            store_cotangent<Dual>(branch_bar, i, Pair<C>{bar, bar_dot});
          });
    }
  });
}

void fold(const Fold& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto) {
    using C = Computing<decltype(type)>;
    const C* partials = static_cast<const C*>(p.partials);
    C* out = static_cast<C*>(p.out);
    for (int64_t i = begin; i < end; ++i) out[i] = 0;
    for (int64_t j = 0; j < p.parts; ++j) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) out[i] += partials[j * p.width + i];
    }
  });
}
