// Formulas of the dual ops, for host and device: the one place where their arithmetic is written.
//
// A dual number is (x, xd): primal and tangent. Cotangents of an op's two outputs are a (primal) and
// b (tangent); the backward of a dual op is its ordinary backward in dual arithmetic with the
// cotangents swapped. T is the computing type: float, or double for fp64.
#pragma once

#if defined(__CUDACC__)
#include <cmath>
#define STARS_FN __host__ __device__ __forceinline__
#else
// Always inlined: the CPU kernels are compiled once for every instruction set, and a copy that the
// linker shares between them could use instructions that the machine does not have.
#include "cpu/math.h"
#define STARS_FN inline __attribute__((always_inline))
#endif

namespace stars {

template <typename T>
struct Pair {
  T x, xd;
};

// Value and first two derivatives of an elementwise function.
template <typename T>
struct Jet {
  T f, f1, f2;
};

// -- elementwise functions. Each has `static Jet<T> at(T x)`.

struct Silu {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    const T s = T(1) / (T(1) + exp(-x));
    const T slope = s * (T(1) - s);
    return {x * s, s + x * slope, slope * (T(2) + x * (T(1) - T(2) * s))};
  }
};

struct Gelu {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    const T density = exp(T(-0.5) * x * x) * T(0.39894228040143267794);
    const T cumulative = T(0.5) * (T(1) + erf(x * T(0.70710678118654752440)));
    return {x * cumulative, cumulative + x * density, density * (T(2) - x * x)};
  }
};

struct GeluTanh {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    const T scale = T(0.79788456080286535588), cubic = T(0.044715);
    const T t = tanh(scale * x * (T(1) + cubic * x * x));
    const T du = scale * (T(1) + T(3) * cubic * x * x);
    const T d2u = T(6) * scale * cubic * x;
    const T sech2 = (T(1) - t) * (T(1) + t);
    return {T(0.5) * x * (T(1) + t), T(0.5) * (T(1) + t) + T(0.5) * x * sech2 * du,
            sech2 * du + T(0.5) * x * sech2 * (d2u - T(2) * t * du * du)};
  }
};

struct Relu {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    const bool closed = x <= T(0);  // NaN is not, and passes as it does in torch
    return {closed ? T(0) : x, closed ? T(0) : T(1), T(0)};
  }
};

struct Sigmoid {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    const T s = T(1) / (T(1) + exp(-x));
    const T slope = s * (T(1) - s);
    return {s, slope, slope * (T(1) - T(2) * s)};
  }
};

struct Tanh {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    const T t = tanh(x);
    const T slope = (T(1) - t) * (T(1) + t);
    return {t, slope, T(-2) * t * slope};
  }
};

struct Exp {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    const T e = exp(x);
    return {e, e, e};
  }
};

struct Log {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    const T inverse = T(1) / x;
    return {log(x), inverse, -inverse * inverse};
  }
};

struct Sqrt {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    const T y = sqrt(x);
    return {y, T(0.5) / y, T(-0.25) / (y * x)};
  }
};

struct Rsqrt {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    const T y = T(1) / sqrt(x);
    return {y, T(-0.5) * y / x, T(0.75) * y / (x * x)};
  }
};

struct Reciprocal {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    const T y = T(1) / x;
    return {y, -y * y, T(2) * y * y * y};
  }
};

struct Square {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    return {x * x, T(2) * x, T(2)};
  }
};

struct Sin {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    const T s = sin(x);
    return {s, cos(x), -s};
  }
};

struct Cos {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    const T c = cos(x);
    return {c, -sin(x), -c};
  }
};

struct Erf {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    const T slope = exp(-x * x) * T(1.12837916709551257390);
    return {erf(x), slope, T(-2) * x * slope};
  }
};

struct Abs {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    return {x < T(0) ? -x : x, x > T(0) ? T(1) : (x < T(0) ? T(-1) : T(0)), T(0)};
  }
};

// Derivatives by the result, for a backward that keeps y and yd: f' = g(y), f'' xd = k(y) yd. Then
// `pointwise_backward` of (y, yd) with (g, k) for (f', f'') is that of (x, xd).

struct SigmoidResult {
  template <typename T>
  static STARS_FN Jet<T> at(T y) {
    return {y, y * (T(1) - y), T(1) - T(2) * y};
  }
};

struct TanhResult {
  template <typename T>
  static STARS_FN Jet<T> at(T y) {
    return {y, (T(1) - y) * (T(1) + y), T(-2) * y};
  }
};

struct ExpResult {
  template <typename T>
  static STARS_FN Jet<T> at(T y) {
    return {y, y, T(1)};
  }
};

struct SqrtResult {
  template <typename T>
  static STARS_FN Jet<T> at(T y) {
    return {y, T(0.5) / y, T(-0.5) / (y * y)};
  }
};

struct RsqrtResult {
  template <typename T>
  static STARS_FN Jet<T> at(T y) {
    return {y, T(-0.5) * y * y * y, T(-1.5) * y * y};
  }
};

struct ReciprocalResult {
  template <typename T>
  static STARS_FN Jet<T> at(T y) {
    return {y, -y * y, T(-2) * y};
  }
};

// As a gate: the plain product.
struct Identity {
  template <typename T>
  static STARS_FN Jet<T> at(T x) {
    return {x, T(1), T(0)};
  }
};

// y = f(x), yd = f' xd
template <class F, typename T>
STARS_FN Pair<T> pointwise(T x, T xd) {
  const Jet<T> j = F::at(x);
  return {j.f, j.f1 * xd};
}

// xd_bar = f' b, x_bar = f' a + f'' xd b
template <class F, typename T>
STARS_FN Pair<T> pointwise_backward(T a, T b, T x, T xd) {
  const Jet<T> j = F::at(x);
  return {j.f1 * a + j.f2 * xd * b, j.f1 * b};
}

// y = f(g) u, yd = f' gd u + f ud
template <class F, typename T>
STARS_FN Pair<T> gated(T g, T gd, T u, T ud) {
  const Jet<T> j = F::at(g);
  return {j.f * u, j.f1 * gd * u + j.f * ud};
}

template <typename T>
struct GatedBar {
  Pair<T> g, u;
};

template <class F, typename T>
STARS_FN GatedBar<T> gated_backward(T a, T b, T g, T gd, T u, T ud) {
  const Jet<T> j = F::at(g);
  const T slope = j.f1 * u;
  return {{a * slope + b * (j.f2 * gd * u + j.f1 * ud), b * slope}, {a * j.f + b * j.f1 * gd, b * j.f}};
}

// -- norms. With r = rsqrt(mean(x^2) + eps), n = r x, c = mean(n r xd): n_dot = r xd - n c. LayerNorm
// is the same on the centred pair; its input cotangents are centred at the end.

template <typename T>
STARS_FN Pair<T> normalise(T x, T xd, T r, T c) {
  const T n = r * x;
  return {n, r * xd - n * c};
}

// a, b: cotangents of n, n_dot (the weight already multiplied in); s = mean(b n),
// sd = mean(a n + b n_dot).
template <typename T>
STARS_FN Pair<T> normalise_backward(T a, T b, Pair<T> n, T r, T c, T s, T sd) {
  const T xd_bar = r * (b - n.x * s);
  return {r * (a - n.xd * s - n.x * sd) - c * xd_bar, xd_bar};
}

// -- softmax. With mu = sum(y xd): yd = y (xd - mu). Backward with d = sum(y b),
// dd = sum(y a + yd b).

template <typename T>
STARS_FN Pair<T> softmax_backward(T a, T b, T y, T yd, T d, T dd) {
  const T e = b - d;
  return {yd * e + y * (a - dd), y * e};
}

// -- rotary: the pair (x1, x2) of entries i and i + D/2, with the cosines and sines of both.

template <typename T>
STARS_FN Pair<T> rotate(T x1, T x2, T cos1, T cos2, T sin1, T sin2) {
  return {x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2};
}

template <typename T>
STARS_FN Pair<T> rotate_transpose(T y1, T y2, T cos1, T cos2, T sin1, T sin2) {
  return {y1 * cos1 + y2 * sin2, y2 * cos2 - y1 * sin1};
}

}  // namespace stars
