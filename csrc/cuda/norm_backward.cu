// RMSNorm and LayerNorm, backward. Formulas: dual.h.
#include "dispatch.h"

namespace stars::cuda {

template <typename T, class S, bool Dual>
__global__ void __launch_bounds__(S::threads, residents<S>(kBackwardRegisters))
    norm_backward_kernel(NormBackwardArgs p) {
  const int lane = threadIdx.x % S::lanes, group = threadIdx.x / S::lanes;
  const float full_width = float(p.width);
  RowSum<S> sum;
  ColumnSum<S> weight_bar(p.weight_bar ? p.partials : nullptr, lane, p.width);
  ColumnSum<S> bias_bar(p.bias_bar ? p.partials + int64_t(gridDim.x) * p.width : nullptr, lane,
                        p.width);
  each_row<S>(p.rows, p.width, [&](int64_t row, int width) {
    Operand<T, S, Dual> x, grad, x_bar;
    x.open(p.x, row, lane, width);
    grad.open(p.grad, row, lane, width);
    x_bar.place(p.x_bar, row);
    const Pair<float> mean = row_mean<S>(p.centre, x, lane, width, full_width, sum);
    float sums[6] = {0, 0, 0, 0, 0, 0};
    each_vector<S>(lane, width, [&](int slot, int column) {
      float weight[S::width];
      read(p.weight, column, 1, weight);
      const auto from = x.get(slot, column), bar = grad.get(slot, column);
#pragma unroll
      for (int v = 0; v < S::width; ++v) {
        const Pair<float> at = {from[v].x - mean.x, from[v].xd - mean.xd};
        const float a = weight[v] * bar[v].x, b = weight[v] * bar[v].xd;
        sums[0] += at.x * at.x;
        sums[1] += at.x * at.xd;
        sums[2] += b * at.x;
        sums[3] += a * at.x + b * at.xd;
        sums[4] += a;
        sums[5] += b;
      }
    });
    sum(sums);
    const auto k = coefficients(sums[0], sums[1], full_width, p.eps);
    const auto back = backward_coefficients(sums[2], sums[3], full_width, k);
    // Centred cotangents of n give centred cotangents of x, because n and n_dot have mean 0.
    const Pair<float> shift = {p.centre ? sums[4] / full_width : 0,
                               p.centre ? sums[5] / full_width : 0};
    each_vector<S>(lane, width, [&](int slot, int column) {
      float weight[S::width];
      read(p.weight, column, 1, weight);
      auto from = x.get(slot, column);
      const auto bar = grad.get(slot, column);
#pragma unroll
      for (int v = 0; v < S::width; ++v) {
        const Pair<float> g = bar[v];
        const auto n = normalise(from[v].x - mean.x, from[v].xd - mean.xd, k.r, k.c);
        weight_bar.add(slot, column, v, g.x * n.x + g.xd * n.xd);
        bias_bar.add(slot, column, v, g.x);
        from.set(v, normalise_backward(weight[v] * g.x - shift.x, weight[v] * g.xd - shift.xd, n,
                                       k.r, k.c, back.s, back.sd));
      }
      x_bar.put(slot, column, from);
    });
  });
  weight_bar.finish(lane, group);
  bias_bar.finish(lane, group);
}

cudaError_t norm_backward(const NormBackwardArgs& p, Type type, bool dual, cudaStream_t stream) {
  if (p.width == 0) return cudaSuccess;
  unsigned blocks = 0;
  if (p.rows > 0) {
    const cudaError_t error = with_type(type, [&](auto tag) {
      using T = typename decltype(tag)::type;
      constexpr int kV = kVector<T>;
      const bool vectors = fits_vectors(kV, p.width, {p.grad, p.x, p.x_bar}, {p.weight});
      return with_shape<kV, 8192 / kV>(p.width, vectors, [&](auto shape) {
        using S = decltype(shape);
        return with_dual(dual, [&](auto is_dual) {
          blocks = grid<S>(p.rows, kBackwardRegisters);
          return launch(norm_backward_kernel<T, S, decltype(is_dual)::value>, blocks, S::threads, p,
                        stream);
        });
      });
    });
    if (error != cudaSuccess) return error;
  }
  return fold({p.partials, {p.weight_bar, p.bias_bar}, blocks, p.width}, stream);
}

}  // namespace stars::cuda
