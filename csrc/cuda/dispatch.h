// From an op's arguments to a kernel: types, shapes, grids. Host code.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "row.h"

namespace stars::cuda {

template <typename T>
struct Tag {
  using type = T;
};

// STARS_FEW_KERNELS leaves out fp16 and ordinary tensors: for a test that reads what the compiler says.

template <class F>
cudaError_t with_type(Type type, F f) {
  if (type == Type::f32) return f(Tag<float>{});
#ifndef STARS_FEW_KERNELS
  if (type == Type::f16) return f(Tag<__half>{});
#endif
  return f(Tag<__nv_bfloat16>{});
}

template <class F>
cudaError_t with_dual([[maybe_unused]] bool dual, F f) {
#ifndef STARS_FEW_KERNELS
  if (!dual) return f(std::false_type{});
#endif
  return f(std::true_type{});
}

// Elements of T in one 16-byte access.
template <typename T>
constexpr int kVector = 16 / sizeof(T);

inline bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Whether every access of `vector` elements is aligned.
inline bool fits_vectors(int vector, int width, std::initializer_list<Rows> operands,
                         std::initializer_list<Parameter> parameters = {}) {
  return width % vector == 0 &&
         std::all_of(operands.begin(), operands.end(),
                     [&](const Rows& o) {
                       return aligned(o.data) && o.row % vector == 0 && o.pair % vector == 0;
                     }) &&
         std::all_of(parameters.begin(), parameters.end(),
                     [](const Parameter& p) { return aligned(p.data); });
}

// The shape for rows of `width`. Rows wider than `Most` vectors are not kept in registers.
template <int V, int Most, class F>
cudaError_t with_shape(int width, bool vectors, F f) {
  if (!vectors) return f(Shape<128, 0, 1>{});
  const int count = width / V;
  if (count <= 16) return f(Shape<16, 1, V>{});
  if (count <= 32) return f(Shape<32, 1, V>{});
  if (count <= 64) return f(Shape<64, 1, V>{});
  if (count <= 128) return f(Shape<128, 1, V>{});
  if (count <= 256) return f(Shape<256, 1, V>{});
  if (count <= 512) return f(Shape<512, 1, V>{});
  if (count <= 1024) return f(Shape<512, 2, V>{});
  if constexpr (Most > 1024) {
    if (count <= 2048) return f(Shape<512, 4, V>{});
  }
  return f(Shape<256, 0, V>{});
}

inline int64_t multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 1;
  }
  return count;
}

template <class Args>
cudaError_t launch(void (*kernel)(Args), dim3 blocks, int threads, const Args& args,
                   cudaStream_t stream) {
  void* packed[] = {const_cast<Args*>(&args)};
  return cudaLaunchKernel(kernel, blocks, dim3(threads), packed, 0, stream);
}

// As many blocks as an SM holds at once, on every SM, or fewer where there are fewer rows.
template <class S>
unsigned grid(int64_t rows, int registers) {
  const int64_t tiles = (rows + S::groups - 1) / S::groups;
  return unsigned(std::min(tiles, multiprocessors() * residents<S>(registers)));
}

}  // namespace stars::cuda
