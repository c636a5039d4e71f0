// f(g) u, backward. Formulas: dual.h.
#include "elementwise.h"

namespace stars::cuda {

template <typename T, class F, int V, bool Dual>
__global__ void __launch_bounds__(kElementwiseThreads)
    gated_backward_kernel(Elementwise<GatedBackwardArgs> k) {
  each_element<V>(k.p.rows, k.p.width, k.lanes, [&](int64_t row, int column) {
    Streamed<T, V, Dual> grad, g, u, g_bar, u_bar;
    grad.place(k.p.grad, row);
    g.place(k.p.g, row);
    u.place(k.p.u, row);
    g_bar.place(k.p.g_bar, row);
    u_bar.place(k.p.u_bar, row);
    const auto bar = grad.get(0, column);
    auto gate = g.get(0, column), up = u.get(0, column);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const auto bars =
          stars::gated_backward<F>(bar[v].x, bar[v].xd, gate[v].x, gate[v].xd, up[v].x, up[v].xd);
      gate.set(v, bars.g);
      up.set(v, bars.u);
    }
    g_bar.put(0, column, gate);
    u_bar.put(0, column, up);
  });
}

cudaError_t gated_backward(const GatedBackwardArgs& p, Activation name, Type type, bool dual,
                           cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool vectors = fits_vectors(kVector<T>, p.width, {p.grad, p.g, p.u, p.g_bar, p.u_bar});
    return with_vector<T>(vectors, [&](auto vector) {
      return with_activation(name, [&](auto function) {
        using F = typename decltype(function)::type;
        return with_dual(dual, [&](auto is_dual) {
          return launch_elementwise(gated_backward_kernel<T, F, vector(), is_dual()>, vector(), p,
                                    stream);
        });
      });
    });
  });
}

}  // namespace stars::cuda
