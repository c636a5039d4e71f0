// Elementary functions for the host. In fp32 they are free of branches and of library calls, so that
// loops over them vectorise: within 2 units in the last place, right in the limits, NaN kept. In fp64
// they are those of the C library.
//
// The coefficients are minimax fits (weighted least squares, re-weighted) for the ranges named.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define STARS_MATH inline __attribute__((always_inline))

namespace stars {

STARS_MATH double exp(double x) { return std::exp(x); }
STARS_MATH double erf(double x) { return std::erf(x); }
STARS_MATH double tanh(double x) { return std::tanh(x); }
using std::cos;
using std::log;
using std::sin;
using std::sqrt;

STARS_MATH uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

STARS_MATH float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// 2^k for an exponent of normal numbers.
STARS_MATH float power_of_two(int32_t k) {
  return float_of((static_cast<uint32_t>(k) + 127u) << 23);
}

// exp(x) = 2^k exp(r), |r| <= log(2) / 2.
STARS_MATH float exp(float x) {
  const float low = x < -104.0f ? -104.0f : x;
  const float bounded = low > 89.0f ? 89.0f : low;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = bounded * 1.44269504f + magic;
  const float k = shifted - magic;
  const float r = (bounded - k * 0.693359375f) - k * -2.12194440e-4f;
  float p = 0.0013814558f;
  p = p * r + 0.008368736f;
  p = p * r + 0.04166839f;
  p = p * r + 0.16666521f;
  p = p * r + 0.49999994f;
  p = (p * r * r + r) + 1.0f;
  // Two factors: 2^k alone is out of range where exp(x) is subnormal or just below infinity.
  const int32_t whole = static_cast<int32_t>(bits_of(shifted) - bits_of(magic));
  const int32_t half = whole >> 1;
  return p * power_of_two(half) * power_of_two(whole - half);
}

STARS_MATH float tanh(float x) {
  const float size = x < 0.0f ? -x : x;
  const float z = x * x;
  float p = 0.0021429588f;  // (tanh(x) / x - 1) / x^2 on |x| < 0.625
  p = p * z - 0.008177395f;
  p = p * z + 0.0217007f;
  p = p * z - 0.053946763f;
  p = p * z + 0.13333206f;
  p = p * z - 0.3333333f;
  const float small = x + x * (z * p);
  const float large = 1.0f - 2.0f / (exp(2.0f * size) + 1.0f);
  const float signed_large = x < 0.0f ? -large : large;
  return size < 0.625f ? small : signed_large;
}

STARS_MATH float erf(float x) {
  const float size = x < 0.0f ? -x : x;
  const float z = x * x;
  float p = -9.641514e-06f;  // erf(x) / x - 1 on |x| < 1
  p = p * z + 0.000112569476f;
  p = p * z - 0.0008482829f;
  p = p * z + 0.0052209455f;
  p = p * z - 0.0268654f;
  p = p * z + 0.11283782f;
  p = p * z - 0.37612638f;
  p = p * z + 0.12837917f;
  const float a = size > 4.0f ? 4.0f : size;
  float q = 2.1697722e-05f;  // -log(erfc(x)) on 1 <= x <= 4; erf(4) is 1 in fp32
  q = q * a - 0.00044147394f;
  q = q * a + 0.004205291f;
  q = q * a - 0.025210356f;
  q = q * a + 0.10842212f;
  q = q * a + 0.6332164f;
  q = q * a + 1.1295804f;
  q = q * a - 0.00018847041f;
  const float large = 1.0f - exp(-q);
  const float signed_large = x < 0.0f ? -large : large;
  return size < 1.0f ? x + x * p : signed_large;
}

}  // namespace stars
