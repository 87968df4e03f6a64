// The device language as C++17: what stands in front of a .cu file when the host's compiler builds it.
//
// A kernel becomes a plain function that runs as one fiber per CUDA thread. threadIdx and its like read the context that
// the runtime sets before it switches to a fiber; barriers, shuffles and other collectives are calls into the runtime,
// which carry the caller's file and line so that an error can name them. CUPAGED_EMU_CHECK marks the checked build.
#pragma once
#define CUPAGED_EMU 1

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "types.h"

// noinline: the function that calls a kernel is not instrumented, the kernel is. Module finds kernels by this very text.
#define __global__ __attribute__((noinline, visibility("hidden")))
#define __device__
#define __host__
#define __constant__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define SIMT_API extern "C" __attribute__((visibility("default")))
#define SIMT_LOC const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace simt {
// Where the running fiber is in its grid.
struct Here {
  const uint3* thread;
  uint3 block;
  dim3 block_dim, grid_dim;
  void* dynamic_shared;
};
}  // namespace simt

// ---- the runtime, see runtime.cpp ----------------------------------------------------------------------------------
SIMT_API simt::Here simt_here;
SIMT_API void simt_index_overflow(uint64_t a, int64_t b);
SIMT_API int simt_int32(int64_t value, const char* file, int line);
SIMT_API int simt_barrier(int predicate, int operation, const char* file, int line);
SIMT_API void simt_syncwarp(unsigned mask, const char* file, int line);
SIMT_API uint64_t simt_shuffle(unsigned mask, uint64_t value, int source, int kind, int width, const char* file, int line);
SIMT_API unsigned simt_vote(unsigned mask, int predicate, int kind, const char* file, int line);
SIMT_API void simt_mma(int bf16, float* d, const uint32_t* a, const uint32_t* b, const float* c, const char* file, int line);
SIMT_API void simt_ldmatrix(int matrices, int transposed, uint32_t* r, const void* row, const char* file, int line);
SIMT_API void simt_cp_async(void* shared, const void* global, int bytes, int valid, const char* file, int line);
SIMT_API void simt_cp_commit();
SIMT_API void simt_cp_wait(int groups_in_flight);
SIMT_API void simt_aligned(const void* address, int bytes, const char* file, int line);
SIMT_API void simt_copy(void* to, const void* from, int bytes, const char* file, int line);
SIMT_API void* simt_shared(const void* key, size_t bytes, size_t align, const char* name);
SIMT_API void simt_atomic(void* address, int bytes, const char* file, int line);
SIMT_API void simt_fence_order();

static inline void* simt_dynamic() { return simt_here.dynamic_shared; }

// ---- built-in variables --------------------------------------------------------------------------------------------
#ifdef CUPAGED_EMU_CHECK
namespace simt {
// An unsigned built-in variable whose products with int and with its like may not wrap: `blockIdx.x * stride` is unsigned
// arithmetic, so no sanitizer would see it. Products with unsigned are left alone, for hashes wrap on purpose.
struct Index {
  unsigned value;
  constexpr operator unsigned() const { return value; }
};
static inline unsigned product(uint64_t a, int64_t b) {
  if (b > 0 && a * (uint64_t)b > 0xffffffffull) simt_index_overflow(a, b);
  return (unsigned)(a * (uint64_t)b);
}
static inline unsigned operator*(Index a, Index b) { return product(a.value, b.value); }
static inline unsigned operator*(Index a, int b) { return product(a.value, b); }
static inline unsigned operator*(int a, Index b) { return product(b.value, a); }
template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value && (sizeof(T) >= 4)>>
static inline auto operator*(Index a, T b) { return a.value * b; }
template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value && (sizeof(T) >= 4)>>
static inline auto operator*(T a, Index b) { return a * b.value; }
struct Index3 {
  Index x, y, z;
  template <class V> explicit Index3(const V& v) : x{v.x}, y{v.y}, z{v.z} {}
  operator uint3() const { return {x.value, y.value, z.value}; }
  operator dim3() const { return {x.value, y.value, z.value}; }
};
}  // namespace simt
#define threadIdx (simt::Index3(*simt_here.thread))
#define blockIdx (simt::Index3(simt_here.block))
#define blockDim (simt::Index3(simt_here.block_dim))
#define gridDim (simt::Index3(simt_here.grid_dim))
#else
#define threadIdx (*simt_here.thread)
#define blockIdx (simt_here.block)
#define blockDim (simt_here.block_dim)
#define gridDim (simt_here.grid_dim)
#endif
static constexpr int warpSize = 32;

// ---- barriers, shuffles, votes -------------------------------------------------------------------------------------
static inline void __syncthreads(SIMT_LOC) { simt_barrier(0, 0, file, line); }
static inline int __syncthreads_or(int p, SIMT_LOC) { return simt_barrier(p, 0, file, line); }
static inline int __syncthreads_and(int p, SIMT_LOC) { return simt_barrier(p, 1, file, line); }
static inline int __syncthreads_count(int p, SIMT_LOC) { return simt_barrier(p, 2, file, line); }
static inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_LOC) { simt_syncwarp(mask, file, line); }

namespace simt {
enum Shuffle { SHUFFLE, SHUFFLE_XOR, SHUFFLE_DOWN, SHUFFLE_UP };
enum Vote { BALLOT, ANY, ALL };
template <class T>
static inline T shuffle(unsigned mask, T value, int source, int kind, int width, const char* file, int line) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = simt_shuffle(mask, bits, source, kind, width, file, line);
  memcpy(&value, &bits, sizeof(T));
  return value;
}
}  // namespace simt
#define SIMT_SHUFFLE(name, kind)                                                          \
  template <class T>                                                                      \
  static inline T name(unsigned mask, T value, int source, int width = 32, SIMT_LOC) {    \
    return simt::shuffle(mask, value, source, simt::kind, width, file, line);             \
  }
SIMT_SHUFFLE(__shfl_sync, SHUFFLE)
SIMT_SHUFFLE(__shfl_xor_sync, SHUFFLE_XOR)
SIMT_SHUFFLE(__shfl_down_sync, SHUFFLE_DOWN)
SIMT_SHUFFLE(__shfl_up_sync, SHUFFLE_UP)
static inline unsigned __ballot_sync(unsigned mask, int p, SIMT_LOC) { return simt_vote(mask, p, simt::BALLOT, file, line); }
static inline int __any_sync(unsigned mask, int p, SIMT_LOC) { return (int)simt_vote(mask, p, simt::ANY, file, line); }
static inline int __all_sync(unsigned mask, int p, SIMT_LOC) { return (int)simt_vote(mask, p, simt::ALL, file, line); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}

// ---- atomics: one operating-system thread runs every fiber, so a plain update is atomic; the checker is told first ----
#define SIMT_ATOMIC(name, next)                                                                                   \
  template <class T>                                                                                              \
  __attribute__((no_sanitize("thread"), noinline)) T name(T* p, typename std::common_type<T>::type v, SIMT_LOC) { \
    simt_atomic(p, sizeof(T), file, line);                                                                        \
    const T old = *p;                                                                                             \
    *p = (next);                                                                                                  \
    return old;                                                                                                   \
  }
SIMT_ATOMIC(atomicAdd, old + v)
SIMT_ATOMIC(atomicSub, old - v)
SIMT_ATOMIC(atomicMax, old < v ? v : old)
SIMT_ATOMIC(atomicMin, v < old ? v : old)
SIMT_ATOMIC(atomicExch, v)
SIMT_ATOMIC(atomicOr, old | v)
SIMT_ATOMIC(atomicAnd, old & v)
template <class T>
__attribute__((no_sanitize("thread"), noinline)) T atomicCAS(T* p, typename std::common_type<T>::type expected,
                                                             typename std::common_type<T>::type v, SIMT_LOC) {
  simt_atomic(p, sizeof(T), file, line);
  const T old = *p;
  if (old == expected) *p = v;
  return old;
}

// ---- scalar functions ----------------------------------------------------------------------------------------------
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class A, class B> static inline typename std::common_type<A, B>::type min(A a, B b) { return b < a ? b : a; }
template <class A, class B> static inline typename std::common_type<A, B>::type max(A a, B b) { return a < b ? b : a; }
#define rsqrtf(x) (1.0f / sqrtf(x))  // macros, for the C library has functions of these names, some since glibc 2.42
#define __expf(x) expf(x)
#define __logf(x) logf(x)
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __saturatef(float a) { return !(a > 0) ? 0 : a > 1 ? 1 : a; }
static inline int __float2int_rn(float a) { return (int)lrintf(a); }
static inline unsigned __float_as_uint(float f) { return simt::bits_of(f); }
static inline float __uint_as_float(unsigned u) { return simt::float_of(u); }
static inline int __float_as_int(float f) { return (int)simt::bits_of(f); }
static inline float __int_as_float(int i) { return simt::float_of((unsigned)i); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
