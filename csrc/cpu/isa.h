// All kernels, compiled for the instruction set named by STARS_ISA: the including file has set the
// compiler's target. Everything lies in a namespace of that name, or is always inlined, so that no
// two instruction sets share a function.
#include "../moments.h"
#include "kernels.h"

#define STARS_INLINE __attribute__((always_inline))

namespace stars::cpu::STARS_ISA {
namespace {

struct bf16 {
  uint16_t bits;
};

struct True {
  static constexpr bool value = true;
};
struct False {
  static constexpr bool value = false;
};

template <class T>
struct ComputingOf {
  using type = T;
};
template <>
struct ComputingOf<bf16> {
  using type = float;
};
template <class T>
using Computing = typename ComputingOf<T>::type;

STARS_FN float load(const float* x) { return *x; }
STARS_FN double load(const double* x) { return *x; }
STARS_FN float load(const bf16* x) { return float_of(static_cast<uint32_t>(x->bits) << 16); }

STARS_FN void store(float* out, float x) { *out = x; }
STARS_FN void store(double* out, double x) { *out = x; }
// Rounds to nearest, ties to even.
STARS_FN void store(bf16* out, float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  out->bits = static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded);
}

// A row, or a piece of one: primal and tangent (the same pointer where there is no tangent).
template <class T>
struct Line {
  T *primal, *tangent;
};

template <class T>
STARS_FN Line<T> line(const Rows& rows, int64_t row, int64_t column = 0) {
  T* primal = static_cast<T*>(rows.data) + row * rows.row + column;
  return {primal, primal + rows.pair};
}

template <bool Dual, class T>
STARS_FN Pair<Computing<T>> value(Line<T> x, int64_t i) {
  return {load(x.primal + i), Dual ? load(x.tangent + i) : Computing<T>(0)};
}

template <bool Dual, class T, class C>
STARS_FN void store(Line<T> x, int64_t i, Pair<C> v) {
  store(x.primal + i, v.x);
  if constexpr (Dual) store(x.tangent + i, v.xd);
}

// The backward of an ordinary op is the tangent half of that of its dual, which depends on the
// tangent cotangent alone: without a tangent the one cotangent takes that place.
template <bool Dual, class T>
STARS_FN Pair<Computing<T>> cotangent(Line<T> x, int64_t i) {
  using C = Computing<T>;
  if constexpr (Dual) return value<true>(x, i);
  return {C(0), load(x.primal + i)};
}

template <bool Dual, class T, class C>
STARS_FN void store_cotangent(Line<T> x, int64_t i, Pair<C> v) {
  if constexpr (Dual) store(x.tangent + i, v.xd);
  store(x.primal + i, Dual ? v.x : v.xd);
}

template <class C>
struct Scratch {
  C* data;
  explicit Scratch(int64_t count) : data(static_cast<C*>(std::malloc(count * sizeof(C)))) {
    if (!data && count) std::abort();
  }
  ~Scratch() { std::free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

template <class T, class Body>
void by_dual(bool dual, Body& body) {
  dual ? body(T{}, True{}) : body(T{}, False{});
}

template <class Body>
void by_type(const Call& call, Body body) {
  switch (call.type) {
    case Type::f32: return by_dual<float>(call.dual, body);
    case Type::bf16: return by_dual<bf16>(call.dual, body);
    case Type::f64: return by_dual<double>(call.dual, body);
  }
}

#include "elementwise.h"
#include "norm.h"
#include "rotary.h"
#include "softmax.h"
#include "squares.h"

}  // namespace

#define STARS_TEXT_(x) #x
#define STARS_TEXT(x) STARS_TEXT_(x)
extern const Kernels kernels;
const Kernels kernels = {
    STARS_TEXT(STARS_ISA),
    norm,
    norm_backward,
    sandwich,
    sandwich_backward,
    fold,
    pointwise,
    pointwise_backward,
    gated,
    gated_backward,
    softmax,
    softmax_backward,
    attention_weights,
    attention_weights_backward,
    rotary,
    row_squares,
    row_squares_backward,
};

}  // namespace stars::cpu::STARS_ISA
