// h = residual + RMSNorm(branch), x = RMSNorm(h), backward. Formulas: dual.h.
#include "dispatch.h"

namespace stars::cuda {

template <typename T, class S, bool Dual>
__global__ void __launch_bounds__(S::threads, residents<S>(kBackwardRegisters))
    sandwich_backward_kernel(SandwichBackwardArgs p) {
  const int lane = threadIdx.x % S::lanes, group = threadIdx.x / S::lanes;
  const float full_width = float(p.width);
  const bool normed = p.weight_out.data != nullptr;
  RowSum<S> sum;
  ColumnSum<S> in_bar(p.partials, lane, p.width);
  ColumnSum<S> out_bar(normed ? p.partials + int64_t(gridDim.x) * p.width : nullptr, lane,
                       p.width);
  each_row<S>(p.rows, p.width, [&](int64_t row, int width) {
    Operand<T, S, Dual> h, x_bar, h_bar, branch;
    h.open(p.h, row, lane, width);
    x_bar.open(p.x_bar, row, lane, width);
    h_bar.open(p.h_bar, row, lane, width);
    if (normed) branch.open(p.branch, row, lane, width);
    float sums[6] = {0, 0, 0, 0, 0, 0};
    each_vector<S>(lane, width, [&](int slot, int column) {
      float weight[S::width];
      read(p.weight_in, column, 1, weight);
      const auto from = h.get(slot, column), bar = x_bar.get(slot, column);
#pragma unroll
      for (int v = 0; v < S::width; ++v) {
        const Pair<float> at = from[v];
        const float a = weight[v] * bar[v].x, b = weight[v] * bar[v].xd;
        sums[0] += at.x * at.x;
        sums[1] += at.x * at.xd;
        sums[2] += b * at.x;
        sums[3] += a * at.x + b * at.xd;
      }
      if (normed) {
        const auto added = branch.get(slot, column);
#pragma unroll
        for (int v = 0; v < S::width; ++v) {
          sums[4] += added[v].x * added[v].x;
          sums[5] += added[v].x * added[v].xd;
        }
      }
    });
    sum(sums);
    const auto inner = coefficients(sums[0], sums[1], full_width, p.eps_in);
    const auto inner_back = backward_coefficients(sums[2], sums[3], full_width, inner);

    // Adds to a cotangent of h what comes back through the inner norm. It is computed in both passes
    // that need it: keeping it would cost more registers than the arithmetic costs time.
    const auto total = [&](Pair<float> bar, Pair<float> g, Pair<float> n, float weight) {
      const auto through = normalise_backward(weight * g.x, weight * g.xd, n, inner.r, inner.c,
                                              inner_back.s, inner_back.sd);
      return Pair<float>{bar.x + through.x, bar.xd + through.xd};
    };

    Coefficients<float> outer = {1, 0};
    BackwardCoefficients<float> outer_back = {0, 0};
    if (normed) {
      float products[2] = {0, 0};
      each_vector<S>(lane, width, [&](int slot, int column) {
        float weight_in[S::width], weight_out[S::width];
        read(p.weight_in, column, 1, weight_in);
        read(p.weight_out, column, 1, weight_out);
        const auto from = h.get(slot, column), x = x_bar.get(slot, column);
        const auto bar = h_bar.get(slot, column), added = branch.get(slot, column);
#pragma unroll
        for (int v = 0; v < S::width; ++v) {
          const auto n = normalise(from[v].x, from[v].xd, inner.r, inner.c);
          const auto g = total(bar[v], x[v], n, weight_in[v]);
          const float a = weight_out[v] * g.x, b = weight_out[v] * g.xd;
          products[0] += b * added[v].x;
          products[1] += a * added[v].x + b * added[v].xd;
        }
      });
      sum(products);
      outer = coefficients(sums[4], sums[5], full_width, p.eps_out);
      outer_back = backward_coefficients(products[0], products[1], full_width, outer);
    }

    Operand<T, S, Dual> residual_bar, branch_bar;
    residual_bar.place(p.residual_bar, row);
    if (normed) branch_bar.place(p.branch_bar, row);
    each_vector<S>(lane, width, [&](int slot, int column) {
      float weight_in[S::width], weight_out[S::width];
      read(p.weight_in, column, 1, weight_in);
      read(p.weight_out, column, 1, weight_out);
      const auto from = h.get(slot, column), x = x_bar.get(slot, column);
      auto bar = h_bar.get(slot, column), added = from;
      if (normed) added = branch.get(slot, column);
#pragma unroll
      for (int v = 0; v < S::width; ++v) {
        const auto n = normalise(from[v].x, from[v].xd, inner.r, inner.c);
        const auto g = total(bar[v], x[v], n, weight_in[v]);
        in_bar.add(slot, column, v, x[v].x * n.x + x[v].xd * n.xd);
        bar.set(v, g);
        const auto m = normalise(added[v].x, added[v].xd, outer.r, outer.c);
        out_bar.add(slot, column, v, g.x * m.x + g.xd * m.xd);
        added.set(v, normalise_backward(weight_out[v] * g.x, weight_out[v] * g.xd, m, outer.r,
                                        outer.c, outer_back.s, outer_back.sd));
      }
      residual_bar.put(slot, column, bar);
      if (normed) branch_bar.put(slot, column, added);
    });
  });
  in_bar.finish(lane, group);
  out_bar.finish(lane, group);
}

cudaError_t sandwich_backward(const SandwichBackwardArgs& p, Type type, bool dual,
                              cudaStream_t stream) {
  if (p.width == 0) return cudaSuccess;
  unsigned blocks = 0;
  if (p.rows > 0) {
    const cudaError_t error = with_type(type, [&](auto tag) {
      using T = typename decltype(tag)::type;
      constexpr int kV = kVector<T>;
      const bool vectors = fits_vectors(
          kV, p.width, {p.h_bar, p.x_bar, p.branch, p.h, p.branch_bar, p.residual_bar},
          {p.weight_out, p.weight_in});
      // Eight operands of an fp32 row of 8192 would fill an SM's registers.
      return with_shape<kV, 1024>(p.width, vectors, [&](auto shape) {
        using S = decltype(shape);
        return with_dual(dual, [&](auto is_dual) {
          blocks = grid<S>(p.rows, kBackwardRegisters);
          return launch(sandwich_backward_kernel<T, S, decltype(is_dual)::value>, blocks,
                        S::threads, p, stream);
        });
      });
    });
    if (error != cudaSuccess) return error;
  }
  return fold({p.partials, {p.in_bar, p.out_bar}, blocks, p.width}, stream);
}

}  // namespace stars::cuda
