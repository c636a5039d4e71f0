// What the glue calls: the kernels of one instruction set, on raw pointers. No torch header here, so
// that a test can run them alone.
//
// Every kernel does the part [begin, end) of its work: of the rows, or of the elements where rows do
// not matter. Callers cut the work at multiples of a fixed size, whatever the number of threads, so
// that results do not depend on it. "Computing type" is fp32 for fp32 and bf16, fp64 for fp64.
#pragma once

#include <cstdint>

namespace stars::cpu {

enum class Type { f32, bf16, f64 };

// Rows that are contiguous inside. Strides in elements: `row` from one row to the next, `pair` from a
// primal to its tangent.
struct Rows {
  void* data;
  int64_t row, pair;
};

enum class Function {
  silu, gelu, gelu_tanh, relu, identity,  // as gates too
  sigmoid, tanh, exp, log, sqrt, rsqrt, reciprocal, square, sin, cos, erf, abs,
  sigmoid_result, tanh_result, exp_result, sqrt_result, rsqrt_result, reciprocal_result
};

struct Call {
  Type type;
  bool dual;
  int64_t width;
};

// weight, bias: computing type [width].
struct Norm : Call {
  Rows x, y;
  const void *weight, *bias;
  double eps;
  bool centre;
};

// weight_bar, bias_bar: computing type [parts, width], one part for every `part` rows; null where not
// wanted. Calls start at a multiple of `part` and do at most one.
struct NormBackward : Call {
  Rows grad, x, x_bar;
  const void* weight;
  void *weight_bar, *bias_bar;
  double eps;
  bool centre;
  int64_t part;
};

// weight_out may be null: no norm on the branch.
struct Sandwich : Call {
  Rows branch, residual, h, x;
  const void *weight_out, *weight_in;
  double eps_out, eps_in;
};

// Without weight_out neither branch, branch_bar nor out_bar is touched. Parts as above.
struct SandwichBackward : Call {
  Rows h_bar, x_bar, branch, h, branch_bar, residual_bar;
  const void *weight_out, *weight_in;
  void *out_bar, *in_bar;
  double eps_out, eps_in;
  int64_t part;
};

// out [width] = sum over parts of partials [parts, width], in order. By columns.
struct Fold : Call {
  const void* partials;
  void* out;
  int64_t parts;
};

// By elements.
struct Pointwise : Call {
  Rows x, y;
  Function function;
};

struct PointwiseBackward : Call {
  Rows grad, x, x_bar;
  Function function;
};

// function: one of the first four.
struct Gated : Call {
  Rows g, u, y;
  Function function;
};

struct GatedBackward : Call {
  Rows grad, g, u, g_bar, u_bar;
  Function function;
};

struct Softmax : Call {
  Rows x, y;
};

struct SoftmaxBackward : Call {
  Rows grad, y, x_bar;
};

// Row i of queries of batch b sees the keys [spans[b * batch + 2 i], spans[b * batch + 2 i + 1]);
// rows are [B, heads, queries].
struct Spans {
  const int32_t* data;
  int64_t batch, heads, queries;
};

// In place: `pair` is not used.
struct AttentionWeights : Call {
  Rows s, s_dot;
  Spans spans;
};

struct AttentionWeightsBackward : Call {
  Rows dp, dp_dot, p, p_dot;
  Spans spans;
};

// x [N, B, H, S, width] with strides of the first four, y [N, B, S, H, width] contiguous; cos and sin
// computing type [B or 1, S, width]. Rows are [N, B, S].
struct Rotary : Call {
  const void* x;
  void* y;
  const void *cos, *sin;
  int64_t batch, heads, length;
  int64_t stride_n, stride_b, stride_h, stride_s, table_batch;
  bool transpose;
};

// sums: computing type [rows].
struct RowSquares : Call {
  Rows x;
  void* sums;
};

struct RowSquaresBackward : Call {
  const void* grad;
  Rows x, x_bar;
};

struct Kernels {
  const char* name;
  void (*norm)(const Norm&, int64_t begin, int64_t end);
  void (*norm_backward)(const NormBackward&, int64_t begin, int64_t end);
  void (*sandwich)(const Sandwich&, int64_t begin, int64_t end);
  void (*sandwich_backward)(const SandwichBackward&, int64_t begin, int64_t end);
  void (*fold)(const Fold&, int64_t begin, int64_t end);
  void (*pointwise)(const Pointwise&, int64_t begin, int64_t end);
  void (*pointwise_backward)(const PointwiseBackward&, int64_t begin, int64_t end);
  void (*gated)(const Gated&, int64_t begin, int64_t end);
  void (*gated_backward)(const GatedBackward&, int64_t begin, int64_t end);
  void (*softmax)(const Softmax&, int64_t begin, int64_t end);
  void (*softmax_backward)(const SoftmaxBackward&, int64_t begin, int64_t end);
  void (*attention_weights)(const AttentionWeights&, int64_t begin, int64_t end);
  void (*attention_weights_backward)(const AttentionWeightsBackward&, int64_t begin, int64_t end);
  void (*rotary)(const Rotary&, int64_t begin, int64_t end);
  void (*row_squares)(const RowSquares&, int64_t begin, int64_t end);
  void (*row_squares_backward)(const RowSquaresBackward&, int64_t begin, int64_t end);
};

// The instruction sets compiled in that this machine has, the best last.
struct InstructionSets {
  const Kernels* kernels[3];
  int count;
};
InstructionSets instruction_sets();

inline const Kernels& best_kernels() {
  static const InstructionSets sets = instruction_sets();
  return *sets.kernels[sets.count - 1];
}

}  // namespace stars::cpu
