// From sums over a row to the coefficients of the norm formulas in dual.h, for host and device.
//
// The sums are of products of inputs, so one pass over a row gives all of them: with n = r x and
// n_dot = r xd - n c, mean(b n) = r mean(b x) and mean(a n + b n_dot) = r mean(a x + b xd) - c s.
#pragma once

#include "dual.h"

namespace stars {

template <typename T>
struct Coefficients {
  T r, c;
};

// Sums of x^2 and x xd.
template <typename T>
STARS_FN Coefficients<T> coefficients(T xx, T xxd, T width, T eps) {
  const T r = T(1) / sqrt(xx / width + eps);
  return {r, r * r * (xxd / width)};
}

template <typename T>
struct BackwardCoefficients {
  T s, sd;
};

// Sums of b x and a x + b xd.
template <typename T>
STARS_FN BackwardCoefficients<T> backward_coefficients(T bx, T axbxd, T width, Coefficients<T> k) {
  const T s = k.r * (bx / width);
  return {s, k.r * (axbxd / width) - k.c * s};
}

}  // namespace stars
