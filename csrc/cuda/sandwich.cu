// h = residual + RMSNorm(branch), x = RMSNorm(h), forward. Formulas: dual.h.
#include "dispatch.h"

namespace stars::cuda {

template <typename T, class S, bool Dual>
__global__ void __launch_bounds__(S::threads, residents<S>(kForwardRegisters))
    sandwich_kernel(SandwichArgs p) {
  const int lane = threadIdx.x % S::lanes;
  const float full_width = float(p.width);
  const bool normed = p.weight_out.data != nullptr;
  RowSum<S> sum;
  each_row<S>(p.rows, p.width, [&](int64_t row, int width) {
    Operand<T, S, Dual> branch, residual;
    branch.open(p.branch, row, lane, width);
    residual.open(p.residual, row, lane, width);
    Coefficients<float> outer = {1, 0};
    if (normed) {
      float sums[2] = {0, 0};
      each_vector<S>(lane, width, [&](int slot, int column) {
        const auto part = branch.get(slot, column);
#pragma unroll
        for (int v = 0; v < S::width; ++v) {
          sums[0] += part[v].x * part[v].x;
          sums[1] += part[v].x * part[v].xd;
        }
      });
      sum(sums);
      outer = coefficients(sums[0], sums[1], full_width, p.eps_out);
    }
    Operand<T, S, Dual> h;
    h.place(p.h, row);
    float sums[2] = {0, 0};
    each_vector<S>(lane, width, [&](int slot, int column) {
      float weight[S::width];
      read(p.weight_out, column, 1, weight);
      const auto added = branch.get(slot, column);
      auto part = residual.get(slot, column);
#pragma unroll
      for (int v = 0; v < S::width; ++v) {
        const auto n = normalise(added[v].x, added[v].xd, outer.r, outer.c);
        part.set(v, {part[v].x + weight[v] * n.x, part[v].xd + weight[v] * n.xd});
        // The next norm is that of h as it is stored: the backward sees no other.
        sums[0] += part[v].x * part[v].x;
        sums[1] += part[v].x * part[v].xd;
      }
      h.put(slot, column, part);
    });
    sum(sums);
    Operand<T, S, Dual> x;
    x.place(p.x, row);
    const auto inner = coefficients(sums[0], sums[1], full_width, p.eps_in);
    each_vector<S>(lane, width, [&](int slot, int column) {
      float weight[S::width];
      read(p.weight_in, column, 1, weight);
      auto part = h.get(slot, column);
#pragma unroll
      for (int v = 0; v < S::width; ++v) {
        const auto n = normalise(part[v].x, part[v].xd, inner.r, inner.c);
        part.set(v, {weight[v] * n.x, weight[v] * n.xd});
      }
      x.put(slot, column, part);
    });
  });
}

cudaError_t sandwich(const SandwichArgs& p, Type type, bool dual, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kV = kVector<T>;
    const bool vectors = fits_vectors(kV, p.width, {p.branch, p.residual, p.h, p.x},
                                      {p.weight_out, p.weight_in});
    return with_shape<kV, 8192 / kV>(p.width, vectors, [&](auto shape) {
      using S = decltype(shape);
      return with_dual(dual, [&](auto is_dual) {
        return launch(sandwich_kernel<T, S, decltype(is_dual)::value>,
                      grid<S>(p.rows, kForwardRegisters), S::threads, p, stream);
      });
    });
  });
}

}  // namespace stars::cuda
