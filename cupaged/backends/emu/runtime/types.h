// CUDA's vector types and its 16-bit and 8-bit floats. The floats are storage: arithmetic goes through float.
#pragma once
#include <stdint.h>
#include <string.h>

#include <type_traits>

// ---- vectors: float4, uint2 and their like, with CUDA's alignment ----------------------------------------------------
#define SIMT_VECTOR(T, name, align2, align4)                                        \
  struct name##1 { T x; };                                                          \
  struct alignas(align2) name##2 { T x, y; };                                       \
  struct name##3 { T x, y, z; };                                                    \
  struct alignas(align4) name##4 { T x, y, z, w; };                                 \
  static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                 \
  static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }         \
  static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SIMT_VECTOR(float, float, 8, 16)
SIMT_VECTOR(int, int, 8, 16)
SIMT_VECTOR(unsigned, uint, 8, 16)
SIMT_VECTOR(short, short, 4, 8)
SIMT_VECTOR(unsigned short, ushort, 4, 8)
SIMT_VECTOR(signed char, char, 2, 4)
SIMT_VECTOR(unsigned char, uchar, 2, 4)
SIMT_VECTOR(long long, longlong, 16, 16)
#undef SIMT_VECTOR
struct dim3 { unsigned x, y, z; };

// ---- conversions, round to nearest even -------------------------------------------------------------------------------
namespace simt {
static inline uint32_t bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
static inline float float_of(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

static inline uint16_t to_bf16(float f) {
  const uint32_t u = bits_of(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // CUDA's one NaN
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
static inline float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

static inline uint16_t to_half(float f) {
  uint32_t u = bits_of(f);
  const uint32_t sign = (u >> 16) & 0x8000;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return 0x7fff;
  if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);  // rounds to infinity
  if (u < 0x38800000u)  // subnormal: the adder rounds
    return (uint16_t)(sign | (bits_of(float_of(u) + 0.5f) - 0x3f000000u));
  return (uint16_t)(sign | ((u + 0xfffu + ((u >> 13) & 1) - (112u << 23)) >> 13));
}
static inline float from_half(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  const float f = (float)mantissa * 5.9604644775390625e-08f;  // 2^-24, exact
  return sign ? -f : f;
}

// e4m3: 4 exponent bits with bias 7, 3 mantissa bits, no infinity, one NaN (0x7f), largest value 448; it saturates.
static inline uint8_t to_e4m3(float f) {
  const uint32_t u = bits_of(f), sign = u >> 24 & 0x80, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude >= 0x43e00000u) return (uint8_t)(sign | 0x7e);  // 448 and above
  if (magnitude < 0x3c800000u)  // below 2^-6: subnormal, in steps of 2^-9
    return (uint8_t)(sign | (bits_of(float_of(magnitude) + 16384.0f) - 0x46800000u));
  return (uint8_t)(sign | ((magnitude + 0x7ffffu + (magnitude >> 20 & 1) - (120u << 23)) >> 20));
}
static inline float from_e4m3(uint8_t b) {
  const uint32_t sign = (uint32_t)(b & 0x80) << 24, exponent = b >> 3 & 15, mantissa = b & 7;
  if ((b & 0x7f) == 0x7f) return float_of(sign | 0x7fc00000u);
  if (exponent) return float_of(sign | (exponent + 120) << 23 | mantissa << 20);
  const float f = (float)mantissa * 0.001953125f;  // 2^-9, exact
  return sign ? -f : f;
}
}  // namespace simt

struct alignas(2) __half {
  uint16_t u;
  __half() = default;
  __half(float f) : u(simt::to_half(f)) {}
  operator float() const { return simt::from_half(u); }
};
struct alignas(2) __nv_bfloat16 {
  uint16_t u;
  __nv_bfloat16() = default;
  __nv_bfloat16(float f) : u(simt::to_bf16(f)) {}
  operator float() const { return simt::from_bf16(u); }
};
typedef uint8_t __nv_fp8_storage_t;
struct __nv_fp8_e4m3 {
  __nv_fp8_storage_t __x;
  __nv_fp8_e4m3() = default;
  explicit __nv_fp8_e4m3(float f) : __x(simt::to_e4m3(f)) {}
  explicit operator float() const { return simt::from_e4m3(__x); }
};
struct alignas(4) __half2 { __half x, y; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

static inline float __half2float(__half h) { return h; }
static inline __half __float2half(float f) { return f; }
static inline __half __float2half_rn(float f) { return f; }
static inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
static inline __half2 __floats2half2_rn(float a, float b) { return {a, b}; }
static inline unsigned short __half_as_ushort(__half h) { return h.u; }
static inline __half __ushort_as_half(unsigned short u) {
  __half h;
  h.u = u;
  return h;
}
static inline float __bfloat162float(__nv_bfloat16 h) { return h; }
static inline __nv_bfloat16 __float2bfloat16(float f) { return f; }
static inline __nv_bfloat16 __float2bfloat16_rn(float f) { return f; }
static inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.u; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) {
  __nv_bfloat16 h;
  h.u = u;
  return h;
}
