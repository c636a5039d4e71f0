// Between torch and the kernels: checks, memory, threads, registration. Only the stable ABI is used,
// so that one build serves torch 2.11 and later and every Python. The schemas are defined in
// stars_fast/ops/library.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace stars::cpu {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kPart = 4096;    // elements that one call of a kernel takes
constexpr int64_t kGrain = 32768;  // elements below which another thread does not pay
constexpr int64_t kPartials = 64;  // rows of partial sums of a parameter gradient, at most

Type type_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return Type::f32;
    case ScalarType::BFloat16: return Type::bf16;
    case ScalarType::Double: return Type::f64;
    default: STD_TORCH_CHECK(false, "stars_fast: cpp takes float32, bfloat16 and float64 tensors");
  }
}

ScalarType computing(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

Tensor as(const Tensor& x, ScalarType type) {
  return x.scalar_type() == type ? x : torch::stable::to(x, type);
}

// A contiguous tensor of the computing type of `like`.
Tensor table(const Tensor& x, const Tensor& like) {
  return torch::stable::contiguous(as(x, computing(like)));
}

// A weight or bias [width] likewise; where there is none, `otherwise` everywhere.
Tensor parameter(const OptionalTensor& x, double otherwise, int64_t width, const Tensor& like) {
  if (!x) return torch::stable::full({width}, otherwise, computing(like));
  STD_TORCH_CHECK(x->numel() == width, "stars_fast: expected a parameter of ", width,
                  " entries, got ", x->numel());
  return table(*x, like);
}

// The rows of a tensor [..., width], or of a stack [2, ..., width].
struct Shape {
  int64_t count, width;

  Shape(const Tensor& x, bool dual) : count(1), width(1) {
    const int64_t first = dual, last = x.dim() - 1;
    STD_TORCH_CHECK(!dual || (last >= 0 && x.size(0) == 2), "stars_fast: expected a stack [2, ...]");
    for (int64_t i = first; i < last; ++i) count *= x.size(i);
    if (last >= first) width = x.size(last);
  }
};

// Whether rows lie at one distance from each other, which is written to `row`.
bool evenly_spaced(const Tensor& x, bool dual, int64_t& row) {
  const int64_t last = x.dim() - 1;
  if (last < dual || (x.size(last) > 1 && x.stride(last) != 1)) return false;
  row = x.size(last);
  int64_t expected = -1;
  for (int64_t i = last - 1; i >= dual; --i) {
    if (x.size(i) == 1) continue;
    if (expected < 0)
      row = x.stride(i);
    else if (x.stride(i) != expected)
      return false;
    expected = x.stride(i) * x.size(i);
  }
  return true;
}

// A tensor as rows for a kernel, copied where they are not evenly spaced, and what owns them.
struct Operand {
  Tensor tensor;
  Rows rows;

  Operand(const Tensor& x, bool dual, const Tensor& like) : tensor(as(x, like.scalar_type())) {
    STD_TORCH_CHECK(x.numel() == like.numel() && x.dim() == like.dim(),
                    "stars_fast: shapes of operands differ");
    int64_t row = 0;
    if (!evenly_spaced(tensor, dual, row)) {
      tensor = torch::stable::contiguous(tensor);
      row = Shape(tensor, dual).width;
    }
    rows = {tensor.data_ptr(), row, dual ? tensor.stride(0) : 0};
  }

  Operand(const Tensor& x, bool dual) : Operand(x, dual, x) {}
};

// The kernel on [0, count) in calls of `part`, each a multiple of it from the start.
template <class Args>
void run(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t count,
         int64_t part, int64_t elements) {
  if (count == 0) return;
  const int64_t calls = (count + part - 1) / part;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, part * elements));
  torch::stable::parallel_for(0, calls, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      kernel(args, i * part, std::min(count, (i + 1) * part));
  });
}

int64_t rows_a_call(int64_t width) { return std::max<int64_t>(1, kPart / std::max<int64_t>(1, width)); }

template <class Args>
void run_rows(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t rows) {
  run(kernel, args, rows, rows_a_call(args.width), args.width);
}

// Partial sums of a parameter gradient, one row for every `part` rows of the input.
struct ParameterGradient {
  Tensor partials;
  bool wanted;

  ParameterGradient(bool wanted, const Shape& shape, int64_t part, const Tensor& like)
      : partials(torch::stable::new_empty(
            like, {wanted ? (shape.count + part - 1) / part : 0, shape.width}, computing(like))),
        wanted(wanted) {}

  void* data() const { return wanted ? partials.data_ptr() : nullptr; }

  Tensor sum(const Call& call) const {
    const Tensor out = torch::stable::new_empty(partials, {wanted ? call.width : 0});
    if (!wanted) return out;
    const int64_t parts = partials.size(0);
    run(best_kernels().fold, Fold{call, partials.data_ptr(), out.data_ptr(), parts}, call.width, 512,
        parts);
    return out;
  }
};

int64_t rows_a_part(const Shape& shape) {
  return std::max(rows_a_call(shape.width), (shape.count + kPartials - 1) / kPartials);
}

Tensor norm(Tensor x, OptionalTensor weight, OptionalTensor bias, double eps, bool centre, bool dual) {
  const Shape shape(x, dual);
  const Tensor out = torch::stable::new_empty(x, x.sizes());
  const Tensor w = parameter(weight, 1, shape.width, x), b = parameter(bias, 0, shape.width, x);
  const Operand in(x, dual), y(out, dual);
  run_rows(best_kernels().norm,
           Norm{{type_of(x), dual, shape.width}, in.rows, y.rows, w.data_ptr(), b.data_ptr(), eps, centre},
           shape.count);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(Tensor grad, Tensor x, OptionalTensor weight,
                                                 double eps, bool centre, bool dual,
                                                 bool weight_grad, bool bias_grad) {
  const Shape shape(x, dual);
  const int64_t part = rows_a_part(shape);
  const Tensor out = torch::stable::new_empty(x, x.sizes());
  const Tensor w = parameter(weight, 1, shape.width, x);
  const Operand bar(grad, dual, x), in(x, dual), x_bar(out, dual);
  const ParameterGradient weight_bar(weight_grad, shape, part, x), bias_bar(bias_grad, shape, part, x);
  const NormBackward args{{type_of(x), dual, shape.width}, bar.rows, in.rows, x_bar.rows, w.data_ptr(),
                          weight_bar.data(), bias_bar.data(), eps, centre, part};
  run(best_kernels().norm_backward, args, shape.count, part, shape.width);
  return {out, weight_bar.sum(args), bias_bar.sum(args)};
}

std::tuple<Tensor, Tensor> sandwich(Tensor branch, Tensor residual, OptionalTensor weight_out,
                                    Tensor weight_in, double eps_out, double eps_in, bool dual) {
  const Shape shape(branch, dual);
  const Tensor h = torch::stable::new_empty(branch, branch.sizes());
  const Tensor x = torch::stable::new_empty(branch, branch.sizes());
  const Tensor w_out = parameter(weight_out, 1, shape.width, branch);
  const Tensor w_in = parameter(weight_in, 1, shape.width, branch);
  const Operand from(branch, dual), before(residual, dual, branch), to_h(h, dual), to_x(x, dual);
  run_rows(best_kernels().sandwich,
           Sandwich{{type_of(branch), dual, shape.width}, from.rows, before.rows, to_h.rows, to_x.rows,
                    weight_out ? w_out.data_ptr() : nullptr, w_in.data_ptr(), eps_out, eps_in},
           shape.count);
  return {h, x};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sandwich_backward(
    Tensor h_bar, Tensor x_bar, Tensor branch, Tensor h, OptionalTensor weight_out, Tensor weight_in,
    double eps_out, double eps_in, bool dual) {
  const Shape shape(h, dual);
  const int64_t part = rows_a_part(shape);
  const bool normed = weight_out.has_value();
  const Tensor residual_out = torch::stable::new_empty(h, h.sizes());
  const Tensor branch_out =
      normed ? torch::stable::new_empty(h, h.sizes()) : torch::stable::new_empty(h, {0});
  const Tensor w_out = parameter(weight_out, 1, shape.width, h);
  const Tensor w_in = parameter(weight_in, 1, shape.width, h);
  const Operand from_h(h_bar, dual, h), from_x(x_bar, dual, h), out(h, dual);
  const Operand from(normed ? branch : h, dual, h), residual_bar(residual_out, dual);
  const Operand branch_bar(normed ? branch_out : residual_out, dual);
  const ParameterGradient out_bar(normed, shape, part, h), in_bar(true, shape, part, h);
  const SandwichBackward args{{type_of(h), dual, shape.width},
                              from_h.rows, from_x.rows, from.rows, out.rows, branch_bar.rows,
                              residual_bar.rows,
                              normed ? w_out.data_ptr() : nullptr, w_in.data_ptr(),
                              out_bar.data(), in_bar.data(), eps_out, eps_in, part};
  run(best_kernels().sandwich_backward, args, shape.count, part, shape.width);
  return {branch_out, residual_out, out_bar.sum(args), in_bar.sum(args)};
}

Function function_of(const std::string& name) {
  static const char* const names[] = {"silu", "gelu", "gelu_tanh", "relu", "identity", "sigmoid", "tanh",
                                      "exp", "log", "sqrt", "rsqrt", "reciprocal", "square",
                                      "sin", "cos", "erf", "abs", "sigmoid_result",
                                      "tanh_result", "exp_result", "sqrt_result", "rsqrt_result",
                                      "reciprocal_result"};
  int i = 0;
  for (const char* known : names) {
    if (name == known) return static_cast<Function>(i);
    ++i;
  }
  STD_TORCH_CHECK(false, "stars_fast: unknown function ", name);
}

Function activation_of(const std::string& name) {
  const Function function = function_of(name);
  STD_TORCH_CHECK(function <= Function::identity, "stars_fast: unknown activation ", name);
  return function;
}

// Operands of an elementwise op: contiguous tensors are one row.
struct Elements {
  Call call;
  int64_t count;
  std::vector<Operand> operands;

  Elements(const Tensor& like, bool dual, std::initializer_list<Tensor> tensors) {
    const Shape shape(like, dual);
    count = shape.count * shape.width;
    bool flat = true;
    for (const Tensor& x : tensors) {
      operands.emplace_back(x, dual, like);
      flat = flat && operands.back().tensor.is_contiguous();
    }
    call = {type_of(like), dual, flat ? count : shape.width};
  }

  const Rows& operator[](int i) const { return operands[i].rows; }
};

template <class Args>
void run_elements(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t count) {
  run(kernel, args, count, kPart, 1);
}

Tensor pointwise(Tensor x, std::string name, bool dual) {
  const Tensor out = torch::stable::new_empty(x, x.sizes());
  const Elements all(x, dual, {x, out});
  run_elements(best_kernels().pointwise, Pointwise{all.call, all[0], all[1], function_of(name)},
               all.count);
  return out;
}

Tensor pointwise_backward(Tensor grad, Tensor x, std::string name, bool dual) {
  const Tensor out = torch::stable::new_empty(x, x.sizes());
  const Elements all(x, dual, {grad, x, out});
  run_elements(best_kernels().pointwise_backward,
               PointwiseBackward{all.call, all[0], all[1], all[2], function_of(name)}, all.count);
  return out;
}

Tensor gated(Tensor g, Tensor u, std::string name, bool dual) {
  const Tensor out = torch::stable::new_empty(g, g.sizes());
  const Elements all(g, dual, {g, u, out});
  run_elements(best_kernels().gated, Gated{all.call, all[0], all[1], all[2], activation_of(name)},
               all.count);
  return out;
}

std::tuple<Tensor, Tensor> gated_backward(Tensor grad, Tensor g, Tensor u, std::string name,
                                          bool dual) {
  const Tensor g_bar = torch::stable::new_empty(g, g.sizes());
  const Tensor u_bar = torch::stable::new_empty(g, g.sizes());
  const Elements all(g, dual, {grad, g, u, g_bar, u_bar});
  run_elements(best_kernels().gated_backward,
               GatedBackward{all.call, all[0], all[1], all[2], all[3], all[4], activation_of(name)},
               all.count);
  return {g_bar, u_bar};
}

Tensor softmax(Tensor x, bool dual) {
  const Shape shape(x, dual);
  const Tensor out = torch::stable::new_empty(x, x.sizes());
  const Operand in(x, dual), y(out, dual);
  run_rows(best_kernels().softmax, Softmax{{type_of(x), dual, shape.width}, in.rows, y.rows},
           shape.count);
  return out;
}

Tensor softmax_backward(Tensor grad, Tensor y, bool dual) {
  const Shape shape(y, dual);
  const Tensor out = torch::stable::new_empty(y, y.sizes());
  const Operand bar(grad, dual, y), value(y, dual), x_bar(out, dual);
  run_rows(best_kernels().softmax_backward,
           SoftmaxBackward{{type_of(y), dual, shape.width}, bar.rows, value.rows, x_bar.rows},
           shape.count);
  return out;
}

// What is written in place can't be copied.
Rows in_place(const Tensor& x, const Tensor& like) {
  int64_t row = 0;
  STD_TORCH_CHECK(evenly_spaced(x, false, row) && x.scalar_type() == like.scalar_type() &&
                      x.numel() == like.numel() && x.dim() == 4,
                  "stars_fast: attention_weights: expected tensors [B, H, Sq, Sk] of one shape and "
                  "dtype, whose rows are evenly spaced");
  return {x.data_ptr(), row, 0};
}

// The spans [B or 1, Sq, 2] of logits s, as contiguous int32.
Tensor spans_table(const Tensor& spans, const Tensor& s) {
  const bool fits = spans.dim() == 3 && (spans.size(0) == 1 || spans.size(0) == s.size(0)) &&
                    spans.size(1) == s.size(2) && spans.size(2) == 2;
  STD_TORCH_CHECK(fits, "stars_fast: attention_weights: expected spans [B or 1, Sq, 2]");
  return torch::stable::contiguous(as(spans, ScalarType::Int));
}

Spans spans_of(const Tensor& table, const Tensor& s) {
  return {static_cast<const int32_t*>(table.data_ptr()),
          table.size(0) == 1 ? 0 : 2 * table.size(1), s.size(1), s.size(2)};
}

void attention_weights(Tensor s, Tensor s_dot, Tensor spans) {
  const Shape shape(s, false);
  const Rows primal = in_place(s, s), tangent = in_place(s_dot, s);
  const Tensor bounds = spans_table(spans, s);
  run_rows(best_kernels().attention_weights,
           AttentionWeights{{type_of(s), true, shape.width}, primal, tangent, spans_of(bounds, s)},
           shape.count);
}

void attention_weights_backward(Tensor dp, Tensor dp_dot, Tensor p, Tensor p_dot, Tensor spans) {
  const Shape shape(dp, false);
  const Rows primal = in_place(dp, dp), tangent = in_place(dp_dot, dp);
  const Operand weight(p, false, dp), weight_dot(p_dot, false, dp);
  const Tensor bounds = spans_table(spans, dp);
  run_rows(best_kernels().attention_weights_backward,
           AttentionWeightsBackward{{type_of(dp), true, shape.width}, primal, tangent, weight.rows,
                                    weight_dot.rows, spans_of(bounds, dp)},
           shape.count);
}

Tensor rotary(Tensor x, Tensor cos, Tensor sin, bool transpose) {
  STD_TORCH_CHECK(x.dim() == 5 && x.size(4) % 2 == 0,
                  "stars_fast: rotary: expected x [N, B, H, S, D] with D even");
  const int64_t n = x.size(0), b = x.size(1), h = x.size(2), s = x.size(3), d = x.size(4);
  for (const Tensor& t : {cos, sin})
    STD_TORCH_CHECK(t.dim() == 3 && (t.size(0) == 1 || t.size(0) == b) && t.size(1) == s &&
                        t.size(2) == d && t.size(0) == cos.size(0),
                    "stars_fast: rotary: expected cos and sin [B or 1, S, D]");
  const Tensor in = x.stride(4) == 1 ? x : torch::stable::contiguous(x);
  const Tensor cosines = table(cos, x), sines = table(sin, x);
  const Tensor out = torch::stable::new_empty(x, {n, b, s, h, d});
  const Rotary args{{type_of(x), false, d}, in.data_ptr(), out.data_ptr(), cosines.data_ptr(),
                    sines.data_ptr(), b, h, s, in.stride(0), in.stride(1), in.stride(2), in.stride(3),
                    cos.size(0) == 1 ? 0 : s * d, transpose};
  if (x.numel() > 0) run(best_kernels().rotary, args, n * b * s, rows_a_call(h * d), h * d);
  return torch::stable::transpose(out, 2, 3);
}

Tensor row_squares(Tensor x) {
  STD_TORCH_CHECK(x.dim() > 0, "stars_fast: row_squares: expected at least one dimension");
  const Shape shape(x, false);
  const auto sizes = x.sizes();
  const std::vector<int64_t> lead(sizes.begin(), sizes.end() - 1);
  const Tensor out = torch::stable::new_empty(x, lead, computing(x));
  const Operand in(x, false);
  run_rows(best_kernels().row_squares,
           RowSquares{{type_of(x), false, shape.width}, in.rows, out.data_ptr()}, shape.count);
  return out;
}

Tensor row_squares_backward(Tensor grad, Tensor x) {
  const Shape shape(x, false);
  STD_TORCH_CHECK(grad.numel() == shape.count, "stars_fast: row_squares: expected ", shape.count,
                  " gradients, got ", grad.numel());
  const Tensor out = torch::stable::new_empty(x, x.sizes());
  const Tensor bars = table(grad, x);
  const Operand in(x, false), x_bar(out, false);
  run_rows(best_kernels().row_squares_backward,
           RowSquaresBackward{{type_of(x), false, shape.width}, bars.data_ptr(), in.rows, x_bar.rows},
           shape.count);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(stars_fast, CPU, m) {
  m.impl("norm.cpp", TORCH_BOX(&norm));
  m.impl("norm_backward.cpp", TORCH_BOX(&norm_backward));
  m.impl("sandwich.cpp", TORCH_BOX(&sandwich));
  m.impl("sandwich_backward.cpp", TORCH_BOX(&sandwich_backward));
  m.impl("pointwise.cpp", TORCH_BOX(&pointwise));
  m.impl("pointwise_backward.cpp", TORCH_BOX(&pointwise_backward));
  m.impl("gated.cpp", TORCH_BOX(&gated));
  m.impl("gated_backward.cpp", TORCH_BOX(&gated_backward));
  m.impl("softmax.cpp", TORCH_BOX(&softmax));
  m.impl("softmax_backward.cpp", TORCH_BOX(&softmax_backward));
  m.impl("attention_weights.cpp", TORCH_BOX(&attention_weights));
  m.impl("attention_weights_backward.cpp", TORCH_BOX(&attention_weights_backward));
  m.impl("rotary.cpp", TORCH_BOX(&rotary));
  m.impl("row_squares.cpp", TORCH_BOX(&row_squares));
  m.impl("row_squares_backward.cpp", TORCH_BOX(&row_squares_backward));
}

}  // namespace stars::cpu
