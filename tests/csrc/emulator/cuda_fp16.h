#pragma once

struct __half {
  _Float16 value;
  __half() = default;
  explicit __half(float x) : value(_Float16(x)) {}
};

inline float __half2float(__half x) { return float(x.value); }
inline __half __float2half_rn(float x) { return __half(x); }
