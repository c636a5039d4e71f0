// As trial.cpp, for nvcc: the headers of the CUDA kernels, and a kernel that is launched.
#include "../../cuda/dispatch.h"

__global__ void trial_kernel(float* x) { *x += 1; }

cudaError_t trial(float* x) {
  trial_kernel<<<1, 1>>>(x);
  return cudaGetLastError();
}
