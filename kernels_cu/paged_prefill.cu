// Attention of sequences with any number of new tokens over the paged cache, on tensor cores: prefill, chunks of it, and
// what follows a prefix that was found in the cache.
//
//   qkv [rows, (num_heads + 2 * num_kv_heads) * HEAD_DIM], of which the query heads are read; out [rows, num_heads * HEAD_DIM]
//   key_cache, value_cache [num_blocks, num_kv_heads, block_size, HEAD_DIM]: they hold this step's tokens already
//   block_tables int32 [num_seqs, max_blocks]   query_start int32 [num_seqs + 1]   context_lens int32 [num_seqs]
//   positions int32 [rows]
//   num_decode: the first sequences, which are not computed here
//
// One block of threads takes 64 query rows and one key/value head, 16 rows a warp. A query row is a (token, head of the
// group) pair, so a group shares the keys and values that its tile loads: with 3 heads a tile is 21 tokens. Keys and
// values come in tiles of 64 positions, from the oldest that the tile's first token sees to the last token's own, each
// slot looked up in the block table; while one tile is computed the next one is on its way (cp.async, two stages). The
// arithmetic is in attention_tile.cuh.
//
// The grid covers the largest number of tiles that these sequences may have. Blocks behind the last tile write the zeros
// of rows that belong to no sequence, or have nothing to do. After FlashAttention-2 (arXiv 2307.08691).
#include "attention_tile.cuh"

constexpr int THREADS = 128, ROWS = 64, KEYS = 64, STAGE = 2 * KEYS * HEAD_DIM;

// Keys and values of positions begin .. begin + KEYS - 1 on their way to shared memory; zeros past `last`.
__device__ __forceinline__ void fetch(
    const KV_T* key_cache, const KV_T* value_cache, const int* table, int begin, int last, int kv_head, int num_kv_heads, int block_size, KV_T* stage) {
#pragma unroll 4
  for (int i = threadIdx.x; i < KEYS * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS, position = begin + row;
    const bool valid = position <= last;
    const int64_t block = valid ? table[position / block_size] : 0;
    const int64_t from = kv_offset(block, kv_head, valid ? position % block_size : 0, num_kv_heads, block_size, HEAD_DIM) + chunk * 8;
    copy_async16(chunk_at(stage, row, chunk), key_cache + from, valid ? 16 : 0);
    copy_async16(chunk_at(stage + KEYS * HEAD_DIM, row, chunk), value_cache + from, valid ? 16 : 0);
  }
  copy_async_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) paged_prefill(
    const KV_T* __restrict__ qkv, const KV_T* __restrict__ key_cache, const KV_T* __restrict__ value_cache,
    const int* __restrict__ block_tables, const int* __restrict__ query_start, const int* __restrict__ context_lens,
    const int* __restrict__ positions, KV_T* __restrict__ out, int rows, int num_decode, int num_seqs, int max_blocks,
    int num_heads, int num_kv_heads, int block_size, float scale, int window) {
  DYNAMIC_SHARED(KV_T, stages);  // [2, keys and values, KEYS, HEAD_DIM]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y, group = num_heads / num_kv_heads;
  const QueryTile tile = find_query_tile(query_start, num_decode, num_seqs, rows, ROWS / group);
  if (tile.num_rows == 0) return;
  const int num_queries = tile.num_rows * group;
  const bool live = tile.sequence < num_seqs && context_lens[tile.sequence] > 0;

  // what the lane's two rows see; a row behind the last one, or of no sequence, sees nothing
  int oldest[2], newest[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int r = warp * 16 + lane / 4 + 8 * half;
    newest[half] = live && r < num_queries ? positions[tile.first_row + r / group] : -1;
    oldest[half] = window > 0 && newest[half] >= window ? newest[half] - window + 1 : 0;
  }

  const int64_t row_width = static_cast<int64_t>(num_heads + 2 * num_kv_heads) * HEAD_DIM;
  Query query;
  State state;
  load_query(query, [&](int row) {
    const int r = warp * 16 + row;
    return r < num_queries ? qkv + (tile.first_row + r / group) * row_width + (kv_head * group + r % group) * HEAD_DIM : nullptr;
  });
  clear(state);

  const int of_first = live ? positions[tile.first_row] : 0, last = live ? positions[tile.first_row + tile.num_rows - 1] : -1;
  const int first = window > 0 && of_first >= window ? of_first - window + 1 : 0;
  const int* const table = block_tables + static_cast<int64_t>(live ? tile.sequence : 0) * max_blocks;
  if (first <= last) fetch(key_cache, value_cache, table, first, last, kv_head, num_kv_heads, block_size, stages);
  int stage = 0;
  for (int begin = first; begin <= last; begin += KEYS, stage ^= 1) {
    if (begin + KEYS <= last) {
      fetch(key_cache, value_cache, table, begin + KEYS, last, kv_head, num_kv_heads, block_size, stages + (stage ^ 1) * STAGE);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();  // everybody's part of the tile is there
    const KV_T* const keys = stages + stage * STAGE;
    attend<KEYS>(query, keys, keys + KEYS * HEAD_DIM, begin, oldest, newest, scale * LOG2_E, state);
    __syncthreads();  // the tile has been used: the next round refills its stage
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int r = warp * 16 + lane / 4 + 8 * half;
    if (r >= num_queries) continue;
    KV_T* const result = out + ((tile.first_row + r / group) * static_cast<int64_t>(num_heads) + kv_head * group + r % group) * HEAD_DIM;
    const float factor = newest[half] >= 0 ? 1.0f / state.l[half] : 0.0f;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) {
      store_pair(result + n * 8 + lane % 4 * 2, pair_of<KV_T>(state.out[n][2 * half] * factor, state.out[n][2 * half + 1] * factor));
    }
  }
}
