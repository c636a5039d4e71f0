// f(g) u, forward. Formulas: dual.h.
#include "elementwise.h"

namespace stars::cuda {

template <typename T, class F, int V, bool Dual>
__global__ void __launch_bounds__(kElementwiseThreads) gated_kernel(Elementwise<GatedArgs> k) {
  each_element<V>(k.p.rows, k.p.width, k.lanes, [&](int64_t row, int column) {
    Streamed<T, V, Dual> g, u, y;
    g.place(k.p.g, row);
    u.place(k.p.u, row);
    y.place(k.p.y, row);
    auto gate = g.get(0, column);
    const auto up = u.get(0, column);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const Pair<float> a = gate[v], b = up[v];
      gate.set(v, stars::gated<F>(a.x, a.xd, b.x, b.xd));
    }
    y.put(0, column, gate);
  });
}

cudaError_t gated(const GatedArgs& p, Activation name, Type type, bool dual, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool vectors = fits_vectors(kVector<T>, p.width, {p.g, p.u, p.y});
    return with_vector<T>(vectors, [&](auto vector) {
      return with_activation(name, [&](auto function) {
        using F = typename decltype(function)::type;
        return with_dual(dual, [&](auto is_dual) {
          return launch_elementwise(gated_kernel<T, F, vector(), is_dual()>, vector(), p, stream);
        });
      });
    });
  });
}

}  // namespace stars::cuda
