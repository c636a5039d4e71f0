// What the glue calls: one launcher an op, on raw pointers. No torch header here or below, so that
// nvcc compiles the kernels without one.
//
// A result is contiguous. A launcher returns the error of the launch; nothing waits for the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace stars::cuda {

enum class Type : int32_t { f32, f16, bf16 };

// Rows that are contiguous inside. Strides are in elements: `row` from one row to the next, `pair`
// from a primal row to its tangent. data is null where there is no such operand.
struct Rows {
  void* data;
  int64_t row, pair;
};

// A weight or bias [width] of any type; data is null where there is none.
struct Parameter {
  const void* data;
  Type type;
};

struct NormArgs {
  Rows x, y;
  Parameter weight, bias;
  int64_t rows;
  int32_t width;
  float eps;
  bool centre;
};
cudaError_t norm(const NormArgs& p, Type type, bool dual, cudaStream_t stream);

// A gradient whose pointer is null is not computed. partials: fp32 [2, partial_rows(rows), width],
// may be null where neither gradient is computed.
struct NormBackwardArgs {
  Rows grad, x, x_bar;
  Parameter weight;
  float *weight_bar, *bias_bar, *partials;
  int64_t rows;
  int32_t width;
  float eps;
  bool centre;
};
cudaError_t norm_backward(const NormBackwardArgs& p, Type type, bool dual, cudaStream_t stream);

// Without weight_out the branch is added as it is.
struct SandwichArgs {
  Rows branch, residual, h, x;
  Parameter weight_out, weight_in;
  int64_t rows;
  int32_t width;
  float eps_out, eps_in;
};
cudaError_t sandwich(const SandwichArgs& p, Type type, bool dual, cudaStream_t stream);

// Without weight_out: branch, branch_bar and out_bar are not touched. partials as above.
struct SandwichBackwardArgs {
  Rows h_bar, x_bar, branch, h, branch_bar, residual_bar;
  Parameter weight_out, weight_in;
  float *out_bar, *in_bar, *partials;
  int64_t rows;
  int32_t width;
  float eps_out, eps_in;
};
cudaError_t sandwich_backward(const SandwichBackwardArgs& p, Type type, bool dual,
                              cudaStream_t stream);

// Rows of scratch that hold the parameter gradients of each block until they are summed.
int64_t partial_rows(int64_t rows);

// out[k] [width] = sum over j < blocks of partials[k, j, :], in a fixed order; out[k] may be null.
struct FoldArgs {
  const float* partials;
  float* out[2];
  int64_t blocks;
  int32_t width;
};
cudaError_t fold(const FoldArgs& p, cudaStream_t stream);

}  // namespace stars::cuda
