// How an elementwise kernel covers rows: a power of two of `lanes` threads a row, any width.
#pragma once

#include "dispatch.h"

namespace stars::cuda {

constexpr int kElementwiseThreads = 256;
constexpr int kElementwiseBlocks = 8;  // an SM, at most

template <class Args>
struct Elementwise {
  Args p;
  int32_t lanes;
};

template <typename T, int V, bool Dual>
using Streamed = Operand<T, Shape<1, 0, V>, Dual>;

// f(row, column) for this thread's vectors.
template <int V, class F>
__device__ __forceinline__ void each_element(int64_t rows, int width, int lanes, F f) {
  const int lane = threadIdx.x % lanes, groups = kElementwiseThreads / lanes;
  for (int64_t row = int64_t(blockIdx.x) * groups + threadIdx.x / lanes; row < rows;
       row += int64_t(gridDim.x) * groups) {
    for (int column = lane * V; column < width; column += lanes * V) f(row, column);
  }
}

// Calls f with the activation's type.
template <class F>
cudaError_t with_activation(Activation name, F f) {
  switch (name) {
    case Activation::silu:
      return f(Tag<Silu>{});
    case Activation::gelu:
      return f(Tag<Gelu>{});
    case Activation::gelu_tanh:
      return f(Tag<GeluTanh>{});
    case Activation::relu:
      return f(Tag<Relu>{});
    default:
      return f(Tag<Identity>{});
  }
}

// f gets the elements of an access: those of 16 bytes where everything is aligned, otherwise one.
template <typename T, class F>
cudaError_t with_vector(bool vectors, F f) {
  return vectors ? f(std::integral_constant<int, kVector<T>>{})
                 : f(std::integral_constant<int, 1>{});
}

template <class Args>
cudaError_t launch_elementwise(void (*kernel)(Elementwise<Args>), int vector, const Args& p,
                               cudaStream_t stream) {
  int lanes = 1;
  while (lanes < kElementwiseThreads && lanes * vector < p.width) lanes *= 2;
  const int64_t groups = kElementwiseThreads / lanes;
  const auto blocks = unsigned(
      std::min((p.rows + groups - 1) / groups, multiprocessors() * kElementwiseBlocks));
  return launch(kernel, blocks, kElementwiseThreads, Elementwise<Args>{p, lanes}, stream);
}

}  // namespace stars::cuda
