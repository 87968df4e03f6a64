// Decode attention on tensor cores: one new token a sequence, the contexts cut into equal shares for a fixed grid.
//
//   qkv [rows, (num_heads + 2 * num_kv_heads) * HEAD_DIM]: row s is the one new token of sequence s; its query heads are read
//   key_cache, value_cache [num_blocks, num_kv_heads, block_size, HEAD_DIM], block_size a multiple of 16
//   block_tables int32 [rows, max_blocks]   positions int32 [rows]
//   items int32 [max_items, 4] (sequence, kv_head, first tile, end tile), item_start int32 [blocks + 1]: the host's plan
//     (backends/split_plan.py); block b of the grid works through items item_start[b] .. item_start[b + 1]
//   partial_out float32 [max_items, group, HEAD_DIM]   partial_max, partial_sum float32 [max_items, group]: for merge_items
//
// A tile is 16 positions of the context, beginning at a multiple of 16, so it lies in one block of the cache. Of an
// item's tiles, warp w takes every 4th, and works alone until the item ends:
//
//      global memory --cp.async--> the warp's ring of STAGES tiles in shared memory --ldmatrix--> registers
//      S [16 x 16] = Q [16 x HEAD_DIM] K^T     the group's query heads are the rows of Q, padded to 16 with zeros
//      P = 2^(S - m), m and l brought up to date (online softmax)
//      O [16 x HEAD_DIM] += P V                P goes from accumulator to operand without leaving its registers
//
// So keys and values are read once for all heads of a group, and no barrier of the block stands in the loop; at the end
// the four warps are merged through shared memory. The arithmetic is in attention_tile.cuh. PAGED 0 is the same kernel without block
// tables, for comparison: sequence s has block s, which is as large as its context may get.
//
// After FlashAttention-2 (arXiv 2307.08691), Flash-Decoding, and FlashInfer's split plan (arXiv 2501.01005).
#include "attention_tile.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32, TILE = 16, LARGEST_GROUP = 16;
constexpr int TILE_SIZE = TILE * HEAD_DIM;  // numbers

struct Item { int sequence, kv_head, first, end; };

// The tile's keys and values on their way to shared memory; positions outside oldest .. newest become zeros.
__device__ __forceinline__ void fetch_tile(
    const KV_T* key_cache, const KV_T* value_cache, const int* table, const Item& item, int tile, int oldest, int newest,
    int num_kv_heads, int block_size, KV_T* ring) {
  const int lane = threadIdx.x % 32, begin = tile * TILE;
  const int64_t block = PAGED ? table[begin / block_size] : item.sequence;
  const int64_t at = kv_offset(block, item.kv_head, begin % block_size, num_kv_heads, block_size, HEAD_DIM);
#pragma unroll
  for (int i = lane; i < TILE * CHUNKS; i += 32) {
    const int row = i / CHUNKS, chunk = i % CHUNKS, position = begin + row;
    const int valid = position >= oldest && position <= newest ? 16 : 0;
    const int64_t from = valid ? at + row * HEAD_DIM + chunk * 8 : 0;
    copy_async16(chunk_at(ring, row, chunk), key_cache + from, valid);
    copy_async16(chunk_at(ring + TILE_SIZE, row, chunk), value_cache + from, valid);
  }
}

// The four warps' states of an item -> its partial result. Shared memory: float [WARPS, 16, HEAD_DIM], then m and l [WARPS, 16].
__device__ __forceinline__ void merge_warps(const State& state, int group, int64_t item, float* partial_out, float* partial_max, float* partial_sum) {
  DYNAMIC_SHARED(float, shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* const all_m = shared + WARPS * TILE * HEAD_DIM;
  float* const all_l = all_m + WARPS * TILE;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = warp * TILE + lane / 4 + 8 * half;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) {
      shared[row * HEAD_DIM + n * 8 + lane % 4 * 2] = state.out[n][2 * half];
      shared[row * HEAD_DIM + n * 8 + lane % 4 * 2 + 1] = state.out[n][2 * half + 1];
    }
    if (lane % 4 == 0) {
      all_m[row] = state.m[half];
      all_l[row] = state.l[half];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < group * HEAD_DIM; i += THREADS) {
    const int g = i / HEAD_DIM, d = i % HEAD_DIM;
    float m = minus_infinity(), l = 0.0f, out = 0.0f;
    for (int w = 0; w < WARPS; w++) m = fmaxf(m, all_m[w * TILE + g]);
    const float reference = m == minus_infinity() ? 0.0f : m;  // an item that a window hides wholly: all weights 0
    for (int w = 0; w < WARPS; w++) {  // a warp without tiles has m -infinity and weighs nothing
      const float factor = exp2f(all_m[w * TILE + g] - reference);
      l += all_l[w * TILE + g] * factor;
      out += shared[(w * TILE + g) * HEAD_DIM + d] * factor;
    }
    partial_out[(item * group + g) * HEAD_DIM + d] = out;
    if (d == 0) {
      partial_max[item * group + g] = m;
      partial_sum[item * group + g] = l;
    }
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) paged_decode(
    const KV_T* __restrict__ qkv, const KV_T* __restrict__ key_cache, const KV_T* __restrict__ value_cache,
    const int* __restrict__ block_tables, const int* __restrict__ positions, const int* __restrict__ items, const int* __restrict__ item_start,
    float* __restrict__ partial_out, float* __restrict__ partial_max, float* __restrict__ partial_sum,
    int max_blocks, int num_heads, int num_kv_heads, int block_size, float scale, int window) {
  DYNAMIC_SHARED(KV_T, shared);  // the warps' rings [WARPS, STAGES, 2, TILE, HEAD_DIM]; between items, what merge_warps wants
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = num_heads / num_kv_heads;
  KV_T* const ring = shared + warp * STAGES * 2 * TILE_SIZE;

  for (int at = item_start[blockIdx.x]; at < item_start[blockIdx.x + 1]; at++) {
    const Item item = {items[4 * at], items[4 * at + 1], items[4 * at + 2], items[4 * at + 3]};
    const int newest = positions[item.sequence], oldest = window > 0 && newest >= window ? newest - window + 1 : 0;
    const int* const table = block_tables + static_cast<int64_t>(item.sequence) * max_blocks;
    const KV_T* const of_row = qkv + (static_cast<int64_t>(item.sequence) * (num_heads + 2 * num_kv_heads) + item.kv_head * group) * HEAD_DIM;

    for (int stage = 0; stage < STAGES - 1; stage++) {
      const int tile = item.first + warp + stage * WARPS;
      if (tile < item.end) fetch_tile(key_cache, value_cache, table, item, tile, oldest, newest, num_kv_heads, block_size, ring + stage * 2 * TILE_SIZE);
      copy_async_commit();
    }

    Query query;
    State state;
    load_query(query, [&](int row) { return row < group ? of_row + row * HEAD_DIM : nullptr; });
    clear(state);
    const int all_oldest[2] = {oldest, oldest}, all_newest[2] = {newest, newest};

    int stage = 0, next = STAGES - 1;
    for (int tile = item.first + warp; tile < item.end; tile += WARPS) {
      copy_async_wait<STAGES - 2>();
      __syncwarp();  // every lane's part of this tile is there, and nobody reads the stage that is refilled now
      const int coming = tile + (STAGES - 1) * WARPS;
      if (coming < item.end) fetch_tile(key_cache, value_cache, table, item, coming, oldest, newest, num_kv_heads, block_size, ring + next * 2 * TILE_SIZE);
      copy_async_commit();
      const KV_T* const keys = ring + stage * 2 * TILE_SIZE;
      attend<TILE>(query, keys, keys + TILE_SIZE, tile * TILE, all_oldest, all_newest, scale * LOG2_E, state);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      next = next + 1 == STAGES ? 0 : next + 1;
    }
    copy_async_wait<0>();
    __syncthreads();  // all rings are idle: their memory is the merge's
    merge_warps(state, group, at, partial_out, partial_max, partial_sum);
  }
}
