// The ops `stars_fast::<op>.cuda`: checks, allocation, and the launchers of launch.h, on torch's
// stable ABI. Schemas: stars_fast/ops/library.py.
#ifndef USE_CUDA
#define USE_CUDA  // declares the current stream in torch's C interface
#endif
#ifndef TORCH_TARGET_VERSION
#define TORCH_TARGET_VERSION ((2ULL << 56) | (11ULL << 48))
#endif

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "launch.h"

namespace stars::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// One call of an op: its device and stream, and the checks and allocations that all ops share.
class Call {
 public:
  // x decides device, type, rows and width.
  Call(const char* op, const Tensor& x, bool dual)
      : dual_(dual), op_(op), x_(x), guard_(x.get_device_index()) {
    STD_TORCH_CHECK(x.dim() >= 1 + dual && (!dual || x.size(0) == 2), op,
                    ".cuda: expected ", dual ? "[2, ..., D]" : "[..., D]");
    const int64_t width = x.size(x.dim() - 1);
    STD_TORCH_CHECK(width <= std::numeric_limits<int32_t>::max() / 2, op,
                    ".cuda: the last dimension is too large: ", width);
    width_ = int32_t(width);
    rows_ = 1;
    for (int64_t d = dual; d < x.dim() - 1; ++d) rows_ *= x.size(d);
    type_ = type_of(x);
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  int64_t rows() const { return rows_; }
  int32_t width() const { return width_; }
  Type type() const { return type_; }
  cudaStream_t stream() const { return stream_; }

  // The rows of an input that is like x. Where one stride can't describe them, those of a copy.
  Rows input(const Tensor& given, const char* name) {
    check_device(given, name);
    STD_TORCH_CHECK(given.scalar_type() == x_.scalar_type() && given.dim() == x_.dim(), op_,
                    ".cuda: ", name, ": expected the dtype and shape of the first input");
    for (int64_t d = 0; d < x_.dim(); ++d) {
      STD_TORCH_CHECK(given.size(d) == x_.size(d), op_, ".cuda: ", name,
                      ": expected the shape of the first input");
    }
    std::optional<int64_t> row = row_stride(given);
    if (!row) {
      held_.push_back(torch::stable::contiguous(given));
      return contiguous_rows(held_.back());
    }
    return {const_cast<void*>(given.const_data_ptr()), *row, dual_ ? given.stride(0) : 0};
  }

  // A result with x's shape and dtype.
  Tensor output() const { return torch::stable::new_empty(x_, x_.sizes()); }

  Rows contiguous_rows(const Tensor& t) const {
    return {t.mutable_data_ptr(), width_, dual_ ? rows_ * width_ : 0};
  }

  Parameter parameter(const std::optional<Tensor>& given, const char* name) {
    if (!given) return {nullptr, Type::f32};
    check_device(*given, name);
    STD_TORCH_CHECK(given->dim() == 1 && given->size(0) == width_, op_, ".cuda: ", name,
                    ": expected of shape [", width_, "]");
    held_.push_back(torch::stable::contiguous(*given));
    return {held_.back().const_data_ptr(), type_of(*given)};
  }

  // A parameter gradient [width], or [0] where it is not wanted.
  Tensor gradient(bool wanted) const { return floats({wanted ? width_ : 0}); }

  static float* data(const Tensor& gradient) {
    return gradient.numel() == 0 ? nullptr : static_cast<float*>(gradient.mutable_data_ptr());
  }

  float* partials(bool wanted) {
    if (!wanted) return nullptr;
    held_.push_back(floats({2, partial_rows(rows_), width_}));
    return static_cast<float*>(held_.back().mutable_data_ptr());
  }

  void check(cudaError_t error) const {
    STD_TORCH_CHECK(error == cudaSuccess, op_, ".cuda: ", cudaGetErrorString(error));
  }

 private:
  Type type_of(const Tensor& t) const {
    switch (t.scalar_type()) {
      case ScalarType::Float:
        return Type::f32;
      case ScalarType::Half:
        return Type::f16;
      case ScalarType::BFloat16:
        return Type::bf16;
      default:
        STD_TORCH_CHECK(false, op_, ".cuda: expected float32, float16 or bfloat16");
    }
  }

  void check_device(const Tensor& t, const char* name) const {
    STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == x_.get_device_index(), op_,
                    ".cuda: ", name, ": expected on the device of the first input");
  }

  Tensor floats(const std::vector<int64_t>& shape) const {
    return torch::stable::new_empty(x_, {shape.data(), shape.size()}, ScalarType::Float);
  }

  // The stride from row to row, if there is one and rows are contiguous inside.
  std::optional<int64_t> row_stride(const Tensor& t) const {
    const int64_t last = t.dim() - 1;
    if (width_ > 1 && t.stride(last) != 1) return std::nullopt;
    int64_t row = width_, next = 0;
    bool any = false;
    for (int64_t d = last - 1; d >= int64_t(dual_); --d) {
      if (t.size(d) == 1) continue;
      if (any && t.stride(d) != next) return std::nullopt;
      if (!any) row = t.stride(d);
      any = true;
      next = t.stride(d) * t.size(d);
    }
    return row;
  }

  bool dual_;
  const char* op_;
  Tensor x_;
  torch::stable::accelerator::DeviceGuard guard_;
  std::vector<Tensor> held_;  // copies and scratch: alive until the kernel is on the stream
  int64_t rows_;
  int32_t width_;
  Type type_;
  cudaStream_t stream_;
};

Tensor norm_op(const Tensor& x, const std::optional<Tensor>& weight,
               const std::optional<Tensor>& bias, double eps, bool centre, bool dual) {
  Call call("norm", x, dual);
  const Tensor y = call.output();
  call.check(norm({call.input(x, "x"), call.contiguous_rows(y), call.parameter(weight, "weight"),
                   call.parameter(bias, "bias"), call.rows(), call.width(), float(eps), centre},
                  call.type(), dual, call.stream()));
  return y;
}

std::tuple<Tensor, Tensor, Tensor> norm_backward_op(const Tensor& grad, const Tensor& x,
                                                    const std::optional<Tensor>& weight, double eps,
                                                    bool centre, bool dual, bool weight_grad,
                                                    bool bias_grad) {
  Call call("norm_backward", x, dual);
  const Tensor x_bar = call.output();
  const Tensor weight_bar = call.gradient(weight_grad), bias_bar = call.gradient(bias_grad);
  call.check(norm_backward(
      {call.input(grad, "grad"), call.input(x, "x"), call.contiguous_rows(x_bar),
       call.parameter(weight, "weight"), Call::data(weight_bar), Call::data(bias_bar),
       call.partials(weight_grad || bias_grad), call.rows(), call.width(), float(eps), centre},
      call.type(), dual, call.stream()));
  return {x_bar, weight_bar, bias_bar};
}

std::tuple<Tensor, Tensor> sandwich_op(const Tensor& branch, const Tensor& residual,
                                       const std::optional<Tensor>& weight_out,
                                       const Tensor& weight_in, double eps_out, double eps_in,
                                       bool dual) {
  Call call("sandwich", branch, dual);
  const Tensor h = call.output(), x = call.output();
  call.check(
      sandwich({call.input(branch, "branch"), call.input(residual, "residual"),
                call.contiguous_rows(h), call.contiguous_rows(x),
                call.parameter(weight_out, "weight_out"), call.parameter(weight_in, "weight_in"),
                call.rows(), call.width(), float(eps_out), float(eps_in)},
               call.type(), dual, call.stream()));
  return {h, x};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sandwich_backward_op(
    const Tensor& h_bar, const Tensor& x_bar, const Tensor& branch, const Tensor& h,
    const std::optional<Tensor>& weight_out, const Tensor& weight_in, double eps_out, double eps_in,
    bool dual) {
  Call call("sandwich_backward", h, dual);
  const bool normed = weight_out.has_value();
  const Rows none = {nullptr, 0, 0};
  const Tensor residual_bar = call.output();
  const Tensor branch_bar =
      normed ? call.output() : torch::stable::new_empty(h, {int64_t(0)});
  const Tensor out_bar = call.gradient(normed), in_bar = call.gradient(true);
  call.check(sandwich_backward(
      {call.input(h_bar, "h_bar"), call.input(x_bar, "x_bar"),
       normed ? call.input(branch, "branch") : none, call.input(h, "h"),
       normed ? call.contiguous_rows(branch_bar) : none, call.contiguous_rows(residual_bar),
       call.parameter(weight_out, "weight_out"), call.parameter(weight_in, "weight_in"),
       Call::data(out_bar), Call::data(in_bar), call.partials(true), call.rows(), call.width(),
       float(eps_out), float(eps_in)},
      call.type(), dual, call.stream()));
  return {branch_bar, residual_bar, out_bar, in_bar};
}

}  // namespace
}  // namespace stars::cuda

STABLE_TORCH_LIBRARY_IMPL(stars_fast, CUDA, m) {
  m.impl("norm.cuda", TORCH_BOX(&stars::cuda::norm_op));
  m.impl("norm_backward.cuda", TORCH_BOX(&stars::cuda::norm_backward_op));
  m.impl("sandwich.cuda", TORCH_BOX(&stars::cuda::sandwich_op));
  m.impl("sandwich_backward.cuda", TORCH_BOX(&stars::cuda::sandwich_backward_op));
}
