// RMSNorm and LayerNorm, forward. Formulas: dual.h.
#include "dispatch.h"

namespace stars::cuda {

template <typename T, class S, bool Dual>
__global__ void __launch_bounds__(S::threads, residents<S>(kForwardRegisters))
    norm_kernel(NormArgs p) {
  const int lane = threadIdx.x % S::lanes;
  const float full_width = float(p.width);
  RowSum<S> sum;
  each_row<S>(p.rows, p.width, [&](int64_t row, int width) {
    Operand<T, S, Dual> x, y;
    x.open(p.x, row, lane, width);
    y.place(p.y, row);
    const Pair<float> mean = row_mean<S>(p.centre, x, lane, width, full_width, sum);
    float sums[2] = {0, 0};
    each_vector<S>(lane, width, [&](int slot, int column) {
      const auto part = x.get(slot, column);
#pragma unroll
      for (int v = 0; v < S::width; ++v) {
        const Pair<float> at = {part[v].x - mean.x, part[v].xd - mean.xd};
        sums[0] += at.x * at.x;
        sums[1] += at.x * at.xd;
      }
    });
    sum(sums);
    const auto k = coefficients(sums[0], sums[1], full_width, p.eps);
    each_vector<S>(lane, width, [&](int slot, int column) {
      float weight[S::width], bias[S::width];
      read(p.weight, column, 1, weight);
      read(p.bias, column, 0, bias);
      auto part = x.get(slot, column);
#pragma unroll
      for (int v = 0; v < S::width; ++v) {
        const auto n = normalise(part[v].x - mean.x, part[v].xd - mean.xd, k.r, k.c);
        part.set(v, {weight[v] * n.x + bias[v], weight[v] * n.xd});
      }
      y.put(slot, column, part);
    });
  });
}

cudaError_t norm(const NormArgs& p, Type type, bool dual, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kV = kVector<T>;
    const bool vectors = fits_vectors(kV, p.width, {p.x, p.y}, {p.weight, p.bias});
    return with_shape<kV, 8192 / kV>(p.width, vectors, [&](auto shape) {
      using S = decltype(shape);
      return with_dual(dual, [&](auto is_dual) {
        return launch(norm_kernel<T, S, decltype(is_dual)::value>,
                      grid<S>(p.rows, kForwardRegisters), S::threads, p, stream);
      });
    });
  });
}

}  // namespace stars::cuda
