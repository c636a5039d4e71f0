// The second half of a parameter gradient: the sum of what the blocks left, in a fixed order.
#include "dispatch.h"

namespace stars::cuda {

constexpr int kColumns = 32, kParts = 16;

static __global__ void __launch_bounds__(kColumns* kParts) fold_kernel(FoldArgs p) {
  __shared__ float shared[kParts][kColumns];
  const int part = threadIdx.x / kColumns, local = threadIdx.x % kColumns;
  const int column = blockIdx.x * kColumns + local;
  float* out = p.out[blockIdx.y];
  if (out == nullptr) return;
  float total = 0;
  if (column < p.width) {
    const float* partials = p.partials + blockIdx.y * p.blocks * p.width + column;
    for (int64_t block = part; block < p.blocks; block += kParts) {
      total += partials[block * p.width];
    }
  }
  shared[part][local] = total;
  __syncthreads();
  if (part > 0 || column >= p.width) return;
  for (int other = 1; other < kParts; ++other) total += shared[other][local];
  out[column] = total;
}

cudaError_t fold(const FoldArgs& p, cudaStream_t stream) {
  if (p.out[0] == nullptr && p.out[1] == nullptr) return cudaSuccess;
  return launch(fold_kernel, dim3((p.width + kColumns - 1) / kColumns, 2), kColumns * kParts, p,
                stream);
}

// The narrowest blocks are the most: 128 threads each.
int64_t partial_rows(int64_t rows) {
  return std::min(rows, multiprocessors() * residents<Shape<128, 1, 8>>(kBackwardRegisters));
}

}  // namespace stars::cuda
