// Sums of squares of rows. Included by isa.h.

void row_squares(const RowSquares& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto) {
    using T = decltype(type);
    using C = Computing<T>;
    C* sums = static_cast<C*>(p.sums);
    for (int64_t row = begin; row < end; ++row) {
      const T* x = line<T>(p.x, row).primal;
      C sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < p.width; ++i) sum += load(x + i) * load(x + i);
      sums[row] = sum;
    }
  });
}

void row_squares_backward(const RowSquaresBackward& p, int64_t begin, int64_t end) {
  by_type(p, [&](auto type, auto) {
    using T = decltype(type);
    using C = Computing<T>;
    for (int64_t row = begin; row < end; ++row) {
      const T* x = line<T>(p.x, row).primal;
      T* x_bar = line<T>(p.x_bar, row).primal;
      const C twice = 2 * static_cast<const C*>(p.grad)[row];
#pragma omp simd
      for (int64_t i = 0; i < p.width; ++i) store(x_bar + i, twice * load(x + i));
    }
  });
}
