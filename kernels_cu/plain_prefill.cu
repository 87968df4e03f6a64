// Attention of sequences with any number of new tokens over the paged cache: prefill, chunks of it, and what follows a
// prefix that was found in the cache. The form for any type; paged_prefill.cu is the one on tensor cores.
//
//   qkv [rows, (num_heads + 2 * num_kv_heads) * head_dim], of which the query heads are read; out [rows, num_heads * head_dim]
//   key_cache, value_cache [num_blocks, num_kv_heads, block_size, head_dim]: they hold this step's tokens already
//   block_tables int32 [num_seqs, max_blocks]   query_start int32 [num_seqs + 1]   context_lens int32 [num_seqs]
//   positions int32 [rows]
//   num_decode: the first sequences, which are not computed here
//
// One block of threads takes a tile of 32 query rows and one key/value head. A query row is a (token, head of the group)
// pair, so a group shares the keys and values that its tile loads: with 3 heads a tile is 10 tokens. Keys and values
// come in tiles too, from the oldest position that the tile's first token sees to the last token's own; softmax is
// online (FlashAttention-2, arXiv 2307.08691). Four neighbouring lanes own a row:
//
//   scores      lane s of the four scores keys s, s + 4, ...; maximum and sum of the row by two shuffles
//   weights     through shared memory to the other three
//   output      lane s keeps numbers s, s + 4, ... of the row's output in registers
//
// The grid covers the largest number of tiles that these sequences may have. Blocks behind the last tile write the
// zeros of rows that belong to no sequence, or have nothing to do.
#include "device.cuh"

constexpr int THREADS = 128, ROWS = 32, LANES = THREADS / ROWS;
constexpr int STEP = Vector<KV_T>::size, KEY_STRIDE = HEAD_DIM + STEP, QUERY_STRIDE = HEAD_DIM + 4;
constexpr int KEYS = HEAD_DIM * sizeof(KV_T) > 256 ? 16 : 32;  // 48 KiB of shared memory hold no more
constexpr int UNROLLED = 16 / STEP;                      // 16 numbers of the head at once, whatever their type
constexpr float LOG2_E = 1.4426950408889634f;

extern "C" __global__ void __launch_bounds__(THREADS, 4) plain_prefill(
    const ACT_T* __restrict__ qkv, const KV_T* __restrict__ key_cache, const KV_T* __restrict__ value_cache,
    const int* __restrict__ block_tables, const int* __restrict__ query_start, const int* __restrict__ context_lens,
    const int* __restrict__ positions, ACT_T* __restrict__ out, int rows, int num_decode, int num_seqs, int max_blocks,
    int num_heads, int num_kv_heads, int block_size, float scale, int window) {
  SHARED_ARRAY(float, queries, ROWS * QUERY_STRIDE);
  SHARED_ARRAY(KV_T, keys, KEYS * KEY_STRIDE);
  SHARED_ARRAY(KV_T, values, KEYS * HEAD_DIM);
  SHARED_ARRAY(float, weights, ROWS * KEYS);

  const int kv_head = blockIdx.y, group = num_heads / num_kv_heads;
  const QueryTile tile = find_query_tile(query_start, num_decode, num_seqs, rows, ROWS / group);
  const int num_queries = tile.num_rows * group;
  const bool live = tile.sequence < num_seqs && context_lens[tile.sequence] > 0;

  // query row r: token r / group of the tile, head r % group of the group
  const int r = threadIdx.x / LANES, part = threadIdx.x % LANES;
  const int64_t row = tile.first_row + r / group, head = kv_head * group + r % group;
  const int newest = live && r < num_queries ? positions[row] : -1;  // what row r sees: oldest .. newest
  const int oldest = window > 0 && newest >= window ? newest - window + 1 : 0;

  const int64_t row_heads = num_heads + 2 * num_kv_heads;
  for (int i = threadIdx.x; i < num_queries * HEAD_DIM; i += THREADS) {
    const int q = i / HEAD_DIM, d = i % HEAD_DIM;
    const int64_t from = ((tile.first_row + q / group) * row_heads + kv_head * group + q % group) * HEAD_DIM + d;
    queries[q * QUERY_STRIDE + d] = to_float(qkv[from]) * (scale * LOG2_E);
  }

  float acc[HEAD_DIM / LANES], m = minus_infinity(), l = 0.0f;
#pragma unroll
  for (int e = 0; e < HEAD_DIM / LANES; e++) acc[e] = 0.0f;

  const int last = live && tile.num_rows > 0 ? positions[tile.first_row + tile.num_rows - 1] : -1;
  const int of_first_row = live && tile.num_rows > 0 ? positions[tile.first_row] : 0;
  const int* const table = block_tables + static_cast<int64_t>(live ? tile.sequence : 0) * max_blocks;
  for (int begin = window > 0 && of_first_row >= window ? of_first_row - window + 1 : 0; begin <= last; begin += KEYS) {
    __syncthreads();  // the last tile has been used (and the queries are there)
    for (int i = threadIdx.x; i < KEYS * (HEAD_DIM / STEP); i += THREADS) {
      const int k = i / (HEAD_DIM / STEP), d = i % (HEAD_DIM / STEP) * STEP, position = begin + k;
      Vector<KV_T> key = zeros16<KV_T>(), value = key;
      if (position <= last) {
        const int64_t at = kv_offset(table[position / block_size], kv_head, position % block_size, num_kv_heads, block_size, HEAD_DIM) + d;
        key = load16(key_cache + at);
        value = load16(value_cache + at);
      }
      store16(keys + k * KEY_STRIDE + d, key);
      store16(values + k * HEAD_DIM + d, value);
    }
    __syncthreads();

    float score[KEYS / LANES];
#pragma unroll
    for (int j = 0; j < KEYS / LANES; j++) score[j] = 0.0f;
    if (newest >= 0) {
#pragma unroll UNROLLED
      for (int d = 0; d < HEAD_DIM; d += STEP) {
        float query[STEP];
#pragma unroll
        for (int i = 0; i < STEP; i++) query[i] = queries[r * QUERY_STRIDE + d + i];
#pragma unroll
        for (int j = 0; j < KEYS / LANES; j++) {
          const Vector<KV_T> key = load16(keys + (part + j * LANES) * KEY_STRIDE + d);
#pragma unroll
          for (int i = 0; i < STEP; i++) score[j] += query[i] * to_float(key.at[i]);
        }
      }
    }
    float tile_max = minus_infinity();
#pragma unroll
    for (int j = 0; j < KEYS / LANES; j++) {
      const int position = begin + part + j * LANES;
      if (position < oldest || position > newest) score[j] = minus_infinity();
      tile_max = fmaxf(tile_max, score[j]);
    }
    tile_max = reduce_lanes<Max, LANES>(tile_max);
    const float new_m = fmaxf(m, tile_max);
    const float reference = new_m == minus_infinity() ? 0.0f : new_m;  // a row that has seen nothing yet: all weights 0
    const float shrink = exp2f(m - reference);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < KEYS / LANES; j++) {
      const float weight = exp2f(score[j] - reference);
      weights[r * KEYS + part + j * LANES] = weight;
      sum += weight;
    }
    l = l * shrink + reduce_lanes<Sum, LANES>(sum);
    m = new_m;
    __syncwarp();  // a row's lanes are in one warp
#pragma unroll
    for (int e = 0; e < HEAD_DIM / LANES; e++) acc[e] *= shrink;
#pragma unroll 4
    for (int k = 0; k < KEYS; k++) {
      const float weight = weights[r * KEYS + k];
#pragma unroll
      for (int e = 0; e < HEAD_DIM / LANES; e++) acc[e] += weight * to_float(values[k * HEAD_DIM + part + e * LANES]);
    }
  }

  if (r < num_queries) {
#pragma unroll
    for (int e = 0; e < HEAD_DIM / LANES; e++) {
      out[(row * num_heads + head) * HEAD_DIM + part + e * LANES] = from_float<ACT_T>(newest >= 0 ? acc[e] / l : 0.0f);
    }
  }
}
