// What the row kernels are made of: how a block covers rows, operands, sums along rows and columns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.h"
#include "../moments.h"

namespace stars::cuda {

// `lanes` threads share a row; a vector of `width` elements is one access to memory. With `vectors`
// > 0 each thread keeps that many of every operand in registers; 0: rows of any width, read again
// in each pass.
template <int Lanes, int Vectors, int Width>
struct Shape {
  static constexpr int lanes = Lanes, vectors = Vectors, width = Width;
  static constexpr bool cached = vectors > 0;
  static constexpr int slots = cached ? vectors : 1;
  static constexpr int threads = lanes < 128 ? 128 : lanes;
  static constexpr int groups = threads / lanes;
};

// Registers that a thread with one vector of each operand may use; with more vectors, more.
constexpr int kForwardRegisters = 64;
constexpr int kBackwardRegisters = 128;

// Blocks that an SM (65536 registers) is to hold at once.
template <class S>
constexpr int residents(int registers) {
  const int budget = registers * S::slots < 128 ? registers * S::slots : 128;
  return 65536 / (budget * S::threads);
}

// -- elements

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// By name: torch compiles extensions without the implicit conversions of 16-bit types.
template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

template <typename T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Vec {
  T at[V];
};

template <typename T, int V>
__device__ __forceinline__ Vec<T, V> load(const T* from) {
  return *reinterpret_cast<const Vec<T, V>*>(from);
}

// The same bits, as if they had just been read. Without it the compiler keeps what it computed from
// them (a 16-bit operand widened) for the next pass: twice the registers, and spills.
template <typename T, int V>
__device__ __forceinline__ void forget([[maybe_unused]] Vec<T, V>& vec) {
#ifdef __CUDA_ARCH__
  auto* words = reinterpret_cast<uint32_t*>(&vec);
#pragma unroll
  for (int i = 0; i < int(sizeof(vec) / 4); ++i) asm volatile("" : "+r"(words[i]));
#endif
}

// Where nothing that is `Final` is read again from memory, and the vector has 16 bytes: one access.
// Left to itself the compiler splits some of these stores.
template <bool Final, typename T, int V>
__device__ __forceinline__ void store(T* to, const Vec<T, V>& vec) {
#ifdef __CUDA_ARCH__
  if constexpr (Final && sizeof(vec) == 16) {
    const auto* words = reinterpret_cast<const uint32_t*>(&vec);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3]));
    return;
  }
#endif
  *reinterpret_cast<Vec<T, V>*>(to) = vec;
}

template <typename T, int V>
__device__ __forceinline__ void read(const void* data, int column, float (&out)[V]) {
  const auto vec = load<T, V>(static_cast<const T*>(data) + column);
#pragma unroll
  for (int v = 0; v < V; ++v) out[v] = widen(vec.at[v]);
}

// V entries of a parameter, or `absent` where there is none.
template <int V>
__device__ __forceinline__ void read(const Parameter& p, int column, float absent,
                                     float (&out)[V]) {
  if (p.data == nullptr) {
#pragma unroll
    for (int v = 0; v < V; ++v) out[v] = absent;
  } else if (p.type == Type::f32) {
    read<float>(p.data, column, out);
  } else if (p.type == Type::f16) {
    read<__half>(p.data, column, out);
  } else {
    read<__nv_bfloat16>(p.data, column, out);
  }
}

// -- passes over a row

template <class S, class F>
__device__ __forceinline__ void each_vector(int lane, int width, F f) {
  if constexpr (S::cached) {
#pragma unroll
    for (int slot = 0; slot < S::vectors; ++slot) {
      const int column = (slot * S::lanes + lane) * S::width;
      if (column < width) f(slot, column);
    }
  } else {
    for (int column = lane * S::width; column < width; column += S::lanes * S::width) f(0, column);
  }
}

// A vector of primals and their tangents, packed as in memory: 16-bit operands take half the
// registers. Without Dual the tangents are 0.
template <typename T, int V, bool Dual>
class Part {
 public:
  __device__ __forceinline__ Pair<float> operator[](int v) const {
    if constexpr (Dual) {
      return {widen(half[0].at[v]), widen(half[1].at[v])};
    } else {
      return {widen(half[0].at[v]), 0};
    }
  }

  __device__ __forceinline__ void set(int v, Pair<float> value) {
    half[0].at[v] = narrow<T>(value.x);
    if constexpr (Dual) half[1].at[v] = narrow<T>(value.xd);
  }

  Vec<T, V> half[1 + Dual];
};

// A thread's part of one operand's row.
template <typename T, class S, bool Dual>
class Operand {
 public:
  using Part = cuda::Part<T, S::width, Dual>;

  __device__ __forceinline__ void place(const Rows& rows, int64_t row) {
    data_ = static_cast<T*>(rows.data) + row * rows.row;
    pair_ = rows.pair;
  }

  __device__ __forceinline__ void open(const Rows& rows, int64_t row, int lane, int width) {
    place(rows, row);
    if constexpr (S::cached) {
      each_vector<S>(lane, width, [&](int slot, int column) { held_[slot] = read(column); });
    }
  }

  __device__ __forceinline__ Part get(int slot, int column) {
    if constexpr (S::cached) {
#pragma unroll
      for (auto& half : held_[slot].half) forget(half);
      return held_[slot];
    } else {
      return read(column);
    }
  }

  // Stores, and holds for `get`.
  __device__ __forceinline__ void put(int slot, int column, const Part& part) {
#pragma unroll
    for (int half = 0; half <= Dual; ++half) {
      store<S::cached>(data_ + half * pair_ + column, part.half[half]);
    }
    if constexpr (S::cached) held_[slot] = part;
  }

 private:
  __device__ __forceinline__ Part read(int column) const {
    Part part;
#pragma unroll
    for (int half = 0; half <= Dual; ++half) {
      part.half[half] = load<T, S::width>(data_ + half * pair_ + column);
    }
    return part;
  }

  T* data_;
  int64_t pair_;
  Part held_[S::slots];
};

// -- sums along a row

// Up to six sums together; every thread of the row gets the totals. All threads of a block call it
// at once.
template <class S>
class RowSum {
 public:
  template <int K>
  __device__ __forceinline__ void operator()(float (&sums)[K]) {
    static_assert(K <= kMost, "scratch is too small");
    constexpr int kWithin = S::lanes < 32 ? S::lanes : 32;
#pragma unroll
    for (int offset = kWithin / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int k = 0; k < K; ++k) sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], offset);
    }
    if constexpr (S::lanes > 32) {
      // Two buffers in turn: who writes one again has passed the barrier of the other in between,
      // and with it every reader of the first.
      __shared__ float shared[2][kMost][S::threads / 32];
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int k = 0; k < K; ++k) shared[turn_][k][threadIdx.x / 32] = sums[k];
      }
      __syncthreads();
      const int first = threadIdx.x / S::lanes * (S::lanes / 32);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        sums[k] = 0;
#pragma unroll
        for (int warp = 0; warp < S::lanes / 32; ++warp) sums[k] += shared[turn_][k][first + warp];
      }
      turn_ ^= 1;
    }
  }

 private:
  static constexpr int kMost = 6;
  int turn_ = 0;
};

// The mean of a row, primal and tangent; 0 unless it is wanted.
template <class S, class Operand>
__device__ __forceinline__ Pair<float> row_mean(bool wanted, Operand& x, int lane, int width,
                                                float full_width, RowSum<S>& sum) {
  if (!wanted) return {0, 0};
  float sums[2] = {0, 0};
  each_vector<S>(lane, width, [&](int slot, int column) {
    const auto part = x.get(slot, column);
#pragma unroll
    for (int v = 0; v < S::width; ++v) {
      sums[0] += part[v].x;
      sums[1] += part[v].xd;
    }
  });
  sum(sums);
  return {sums[0] / full_width, sums[1] / full_width};
}

// -- sums along columns

// A block's sum of a parameter gradient over its rows: in registers, or with rows of any width in
// the block's row of `partials`, where each thread owns its columns. Does nothing with null.
template <class S>
class ColumnSum {
 public:
  __device__ __forceinline__ ColumnSum(float* partials, int lane, int width)
      : partials_(partials), width_(width) {
    if constexpr (S::cached) {
#pragma unroll
      for (auto& vec : held_) {
#pragma unroll
        for (float& sum : vec.at) sum = 0;
      }
    } else if (partials != nullptr) {
      each_vector<S>(lane, width, [&](int, int column) { *block(column) = {}; });
    }
  }

  __device__ __forceinline__ void add(int slot, int column, int v, float term) {
    if constexpr (S::cached) {
      held_[slot].at[v] += term;
    } else if (partials_ != nullptr) {
      block(column)->at[v] += term;
    }
  }

  // After the last row; all threads of the block call it at once.
  __device__ __forceinline__ void finish(int lane, int group) {
    if (!S::cached || partials_ == nullptr) return;
    if constexpr (S::groups == 1) {
      each_vector<S>(lane, width_, [&](int slot, int column) { *block(column) = held_[slot]; });
    } else {
      __shared__ Sum shared[S::groups][S::lanes * S::slots];
      __syncthreads();  // an earlier call may still read it
#pragma unroll
      for (int slot = 0; slot < S::slots; ++slot) {
        shared[group][slot * S::lanes + lane] = held_[slot];
      }
      __syncthreads();
      for (int vec = threadIdx.x; vec * S::width < width_; vec += S::threads) {
        Sum total = shared[0][vec];
#pragma unroll
        for (int other = 1; other < S::groups; ++other) {
#pragma unroll
          for (int v = 0; v < S::width; ++v) total.at[v] += shared[other][vec].at[v];
        }
        *block(vec * S::width) = total;
      }
    }
  }

 private:
  using Sum = Vec<float, S::width>;

  __device__ __forceinline__ Sum* block(int column) const {
    return reinterpret_cast<Sum*>(partials_ + int64_t(blockIdx.x) * width_ + column);
  }

  float* partials_;
  int width_;
  Sum held_[S::slots];
};

// Which rows a thread works on. Every thread of a block makes the same number of turns, because
// sums need all of them: in the last turn a row may lie beyond the end and has width 0.
template <class S, class F>
__device__ __forceinline__ void each_row(int64_t rows, int width, F f) {
  const int group = threadIdx.x / S::lanes;
  for (int64_t first = int64_t(blockIdx.x) * S::groups; first < rows;
       first += int64_t(gridDim.x) * S::groups) {
    const int64_t row = first + group;
    f(row, row < rows ? width : 0);
  }
}

}  // namespace stars::cuda
