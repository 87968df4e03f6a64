// What every kernel stands on, and the only file in which the GPU build and the emulator build differ.
//
// First part: what the two builds spell differently (shared memory, and the instructions that CUDA C has no words for).
// Second part: shared by both: conversions, 16-byte vectors, reductions, addresses in the paged cache.
//
// Kernels include this file and nothing else. They write no asm and no __shared__, reach a barrier with all threads of
// the block and a shuffle with all lanes of the warp, move 16 bytes at once through load16 / store16 only, and keep
// every offset into an array of unbounded size in int64_t.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#ifdef CUPAGED_EMU  // ------------------------------------------------------------------------ the emulator

#define SHARED_ARRAY(type, name, count) \
  static char name##_key;               \
  type* const name = static_cast<type*>(simt_shared(&name##_key, sizeof(type) * (count), 16, #name))
#define DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(simt_dynamic())

// Copies `bytes` (1, 2, 4, 8 or 16, aligned to its size) as they are, whatever they hold.
template <int bytes>
__device__ __forceinline__ void copy_raw(void* target, const void* source, SIMT_LOC) {
  simt_copy(target, source, bytes, file, line);
}

// 16 bytes from global to shared memory, behind the thread's back; `valid` = 0 writes zeros and reads nothing.
__device__ __forceinline__ void copy_async16(void* shared, const void* global, int valid, SIMT_LOC) {
  simt_cp_async(shared, global, 16, valid, file, line);
}
__device__ __forceinline__ void copy_async_commit() { simt_cp_commit(); }

__device__ __forceinline__ void require_aligned16(const void* p, SIMT_LOC) { simt_aligned(p, 16, file, line); }
template <int pending>
__device__ __forceinline__ void copy_async_wait() { simt_cp_wait(pending); }

template <class type>
struct is_bfloat16 { static constexpr bool value = false; };
template <>
struct is_bfloat16<__nv_bfloat16> { static constexpr bool value = true; };

template <class type>
__device__ __forceinline__ void mma_m16n8k16(float* d, const unsigned* a, const unsigned* b, SIMT_LOC) {
  simt_mma(is_bfloat16<type>::value, d, a, b, d, file, line);
}
__device__ __forceinline__ void load_matrices_x4(unsigned* r, const void* row, SIMT_LOC) { simt_ldmatrix(4, 0, r, row, file, line); }
__device__ __forceinline__ void load_matrices_x4_transposed(unsigned* r, const void* row, SIMT_LOC) {
  simt_ldmatrix(4, 1, r, row, file, line);
}

#else  // --------------------------------------------------------------------------------------- a GPU

typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned char uint8_t;

#define SHARED_ARRAY(type, name, count) __shared__ __align__(16) type name[count]
#define DYNAMIC_SHARED(type, name)                      \
  extern __shared__ __align__(128) unsigned char dynamic_shared_memory[]; \
  type* const name = reinterpret_cast<type*>(dynamic_shared_memory)

__device__ __forceinline__ void require_aligned16(const void*) {}  // a GPU faults by itself

template <int bytes> struct raw;
template <> struct raw<1> { typedef unsigned char word; };
template <> struct raw<2> { typedef unsigned short word; };
template <> struct raw<4> { typedef unsigned int word; };
template <> struct raw<8> { typedef uint2 word; };
template <> struct raw<16> { typedef uint4 word; };

template <int bytes>
__device__ __forceinline__ void copy_raw(void* target, const void* source) {
  typedef typename raw<bytes>::word word;
  *static_cast<word*>(target) = *static_cast<const word*>(source);
}

__device__ __forceinline__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void copy_async16(void* shared, const void* global, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

// d += a * b on the tensor cores: a 16 x 16, b 16 x 8, d 16 x 8 in float32; fragments as PTX ISA, "mma.m16n8k16", lays them out.
template <class type>
__device__ __forceinline__ void mma_m16n8k16(float* d, const unsigned* a, const unsigned* b);
template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float* d, const unsigned* a, const unsigned* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float* d, const unsigned* a, const unsigned* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit numbers from shared memory; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices_x4(unsigned* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void load_matrices_x4_transposed(unsigned* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

#endif  // ------------------------------------------------------------------------------------- both

constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// ---- numbers: arithmetic is float32, storage may be 16 bits wide, or 8 in the cache (e4m3, which has no infinity: what
// is too large becomes 448)

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return static_cast<float>(x); }

template <class type> __device__ __forceinline__ type from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __nv_fp8_e4m3 from_float<__nv_fp8_e4m3>(float x) { return __nv_fp8_e4m3(x); }

// ---- 16 bytes at once

template <class type>
struct __align__(16) Vector {
  static constexpr int size = 16 / sizeof(type);
  type at[size];
};

// The address must be a multiple of 16.
template <class type>
__device__ __forceinline__ Vector<type> load16(const type* p) {
  require_aligned16(p);
  union { uint4 words; Vector<type> vector; } both;
  both.words = *reinterpret_cast<const uint4*>(p);
  return both.vector;
}

template <class type>
__device__ __forceinline__ void store16(type* p, const Vector<type>& x) {
  require_aligned16(p);
  union { uint4 words; Vector<type> vector; } both;
  both.vector = x;
  *reinterpret_cast<uint4*>(p) = both.words;
}

template <class type>
__device__ __forceinline__ Vector<type> zeros16() {
  Vector<type> x;
#pragma unroll
  for (int i = 0; i < Vector<type>::size; i++) x.at[i] = from_float<type>(0.0f);
  return x;
}

// ---- pairs of 16-bit numbers, as tensor cores take them: the first in the low half

template <class type>
__device__ __forceinline__ unsigned load_pair(const type* p) { return *reinterpret_cast<const unsigned*>(p); }
template <class type>
__device__ __forceinline__ void store_pair(type* p, unsigned pair) { *reinterpret_cast<unsigned*>(p) = pair; }
__device__ __forceinline__ unsigned short bits_of(__half x) { return __half_as_ushort(x); }
__device__ __forceinline__ unsigned short bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
template <class type>
__device__ __forceinline__ unsigned pair_of(float first, float second) {
  return bits_of(from_float<type>(first)) | static_cast<unsigned>(bits_of(from_float<type>(second))) << 16;
}

// ---- reductions: every thread gets the result, and the order of the additions is fixed

struct Sum {
  template <class number> __device__ __forceinline__ static number of(number a, number b) { return a + b; }
};
struct Max {
  template <class number> __device__ __forceinline__ static number of(number a, number b) { return a > b ? a : b; }
};

// Over groups of `width` neighbouring lanes.
template <class Operation, int width = 32, class number>
__device__ __forceinline__ number reduce_lanes(number x) {
#pragma unroll
  for (int step = width / 2; step > 0; step /= 2) x = Operation::of(x, __shfl_xor_sync(ALL_LANES, x, step));
  return x;
}

// Over the block, whose size is a multiple of 32. A barrier at both ends: the shared array may be used again at once.
template <class Operation, class number>
__device__ __forceinline__ number reduce_block(number x) {
  SHARED_ARRAY(number, of_warp, 32);
  x = reduce_lanes<Operation>(x);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  x = of_warp[0];
  for (int warp = 1; warp < static_cast<int>(blockDim.x / 32); warp++) x = Operation::of(x, of_warp[warp]);
  __syncthreads();
  return x;
}

// ---- the paged cache: [num_blocks, num_kv_heads, block_size, head_dim]

// Where the head_dim numbers of one slot and head begin. A pool has more than 2^31 of them.
__device__ __forceinline__ int64_t kv_offset(int64_t block, int head, int offset, int num_kv_heads, int block_size, int head_dim) {
  return ((block * num_kv_heads + head) * block_size + offset) * head_dim;
}

// The sequence that a row of the step belongs to: the last s with query_start[s] <= row; num_seqs for a row of none.
__device__ __forceinline__ int sequence_of_row(const int* query_start, int num_seqs, int row) {
  if (row >= query_start[num_seqs]) return num_seqs;
  int low = 0, high = num_seqs;  // query_start[low] <= row < query_start[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (query_start[middle] <= row) low = middle; else high = middle;
  }
  return low;
}

// Rows of one sequence that a block of a prefill kernel computes.
struct QueryTile {
  int sequence;             // num_seqs: rows of no sequence
  int first_row, num_rows;  // no rows: nothing to do
};

// The tile of this block: the sequences from num_decode on are cut into tiles one after the other, and then the rows
// behind them, which belong to none.
__device__ __forceinline__ QueryTile find_query_tile(const int* query_start, int num_decode, int num_seqs, int rows, int rows_of_tile) {
  int index = blockIdx.x;
  for (int s = num_decode; s <= num_seqs; s++) {
    const int begin = query_start[s], end = s < num_seqs ? query_start[s + 1] : rows;
    const int tiles = (end - begin + rows_of_tile - 1) / rows_of_tile;
    if (index < tiles) {
      const int first = begin + index * rows_of_tile;
      return {s, first, min(rows_of_tile, end - first)};
    }
    index -= tiles;
  }
  return {num_seqs, rows, 0};
}

// ---- logits: an order of (logit, token) pairs

// Unsigned numbers in the order of the floats; -0 and 0 are one number.
__device__ __forceinline__ unsigned order_of(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The larger logit wins, among equals the lower token. Never 0.
__device__ __forceinline__ uint64_t ranked(float logit, int token) {
  return static_cast<uint64_t>(order_of(logit)) << 32 | (0xffffffffu - token);
}
__device__ __forceinline__ int token_of(uint64_t rank) { return static_cast<int>(0xffffffffu - static_cast<unsigned>(rank)); }

// The best token of a row that nothing may be chosen from, instead of a token.
constexpr int DAMAGED = -1, ALL_BANNED = -2;

// The block's best token of a row, or DAMAGED (NaN or +infinity among the logits) or ALL_BANNED (all are -infinity).
__device__ __forceinline__ int best_token(const float* logits, int vocab_size) {
  uint64_t best = 0;
  int damaged = 0;
  for (int i = threadIdx.x; i < vocab_size; i += blockDim.x) {
    const float logit = logits[i];
    damaged |= !(logit < -minus_infinity());
    best = Max::of(best, ranked(logit, i));
  }
  damaged = __syncthreads_or(damaged);
  const int token = token_of(reduce_block<Max>(best));
  if (damaged) return DAMAGED;
  return logits[token] == minus_infinity() ? ALL_BANNED : token;
}
