#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    bits = x != x ? 0x7fff : uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
};

inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t word = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &word, 4);
  return out;
}

inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
