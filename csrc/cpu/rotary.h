// Rotary positions. Included by isa.h.

template <class C, class T, bool Transpose>
void rotary_line(const T* x, T* y, const C* cos, const C* sin, int64_t half) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const C x1 = load(x + i), x2 = load(x + i + half);
    const Pair<C> out =
        Transpose ? rotate_transpose<C>(x1, x2, cos[i], cos[i + half], sin[i], sin[i + half])
                  : rotate<C>(x1, x2, cos[i], cos[i + half], sin[i], sin[i + half]);
    store(y + i, out.x);
    store(y + i + half, out.xd);
  }
}

void rotary(const Rotary& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto) {
    using T = decltype(type);
    using C = Computing<T>;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t s = row % p.length, b = row / p.length % p.batch, n = row / p.length / p.batch;
      const T* x =
          static_cast<const T*>(p.x) + n * p.stride_n + b * p.stride_b + s * p.stride_s;
      T* y = static_cast<T*>(p.y) + row * p.heads * p.width;
      const int64_t table = b * p.table_batch + s * p.width;
      const C* cos = static_cast<const C*>(p.cos) + table;
      const C* sin = static_cast<const C*>(p.sin) + table;
      for (int64_t h = 0; h < p.heads; ++h, x += p.stride_h, y += p.width) {
        if (p.transpose)
          rotary_line<C, T, true>(x, y, cos, sin, p.width / 2);
        else
          rotary_line<C, T, false>(x, y, cos, sin, p.width / 2);
      }
    }
  });
}
