// Decode attention in two passes: the context is cut into partitions, so that one long sequence fills a whole GPU.
//
//   qkv [rows, (num_heads + 2 * num_kv_heads) * head_dim]: row s is the one new token of sequence s; its query heads are read
//   key_cache, value_cache [num_blocks, num_kv_heads, block_size, head_dim]
//   block_tables int32 [rows, max_blocks]   context_lens, positions int32 [rows]
//   partial_out float32 [rows, num_heads, num_parts, head_dim]   partial_max, partial_sum float32 [rows, num_heads, num_parts]
//
//             oldest visible position                                last visible position
//               |  partition 0  |  partition 1  |  partition 2  |  part|
// This is the first pass: a block of threads for every sequence, key/value head and partition computes the output O, the
// maximum m and the sum l of its positions alone. The second one (merge_partitions.cu) puts them together.
//
// The positions come in tiles of 32. All threads load a tile of keys and values into shared memory, once for all
// query heads of the group (a kernel per query head reads them group times). Then each warp works for its own query
// heads: lane i scores position i of the tile, the warp agrees on maximum and sum by shuffles, and the lanes change
// sides to own numbers of the output. Scores are in units of log2, so exp is one instruction.
//
// PAGED 0 is the same kernel without block tables, for comparison: sequence s has block s, as large as its context may get.
//
// A partition without positions, and a padded lane (context 0), says so by sum 0; its partial_out is not written and
// not read. After the second kernel of vLLM (arXiv 2309.06180) and Flash-Decoding.
#include "device.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32, TILE = 32;
constexpr int LARGEST_GROUP = 16, HEADS_OF_WARP = LARGEST_GROUP / WARPS;
constexpr int STEP = Vector<KV_T>::size, KEY_STRIDE = HEAD_DIM + STEP;  // padded: 32 lanes read 32 rows from different banks
constexpr int NUMBERS_OF_LANE = (HEAD_DIM + 31) / 32;
constexpr float LOG2_E = 1.4426950408889634f;

// Rows tile .. tile + 31 of keys and values, with zeros past `last`.
__device__ __forceinline__ void load_tile(
    const KV_T* key_cache, const KV_T* value_cache, const int* table, int64_t sequence, int tile, int last, int kv_head, int num_kv_heads,
    int block_size, KV_T* keys, KV_T* values) {
  for (int i = threadIdx.x; i < TILE * (HEAD_DIM / STEP); i += THREADS) {
    const int row = i / (HEAD_DIM / STEP), d = i % (HEAD_DIM / STEP) * STEP, position = tile + row;
    Vector<KV_T> key = zeros16<KV_T>(), value = key;
    if (position <= last) {
      const int64_t block = PAGED ? table[position / block_size] : sequence;
      const int64_t at = kv_offset(block, kv_head, position % block_size, num_kv_heads, block_size, HEAD_DIM) + d;
      key = load16(key_cache + at);
      value = load16(value_cache + at);
    }
    store16(keys + row * KEY_STRIDE + d, key);
    store16(values + row * HEAD_DIM + d, value);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) attention_partition(
    const ACT_T* __restrict__ qkv, const KV_T* __restrict__ key_cache, const KV_T* __restrict__ value_cache,
    const int* __restrict__ block_tables, const int* __restrict__ context_lens, const int* __restrict__ positions,
    float* __restrict__ partial_out, float* __restrict__ partial_max, float* __restrict__ partial_sum,
    int max_blocks, int num_heads, int num_kv_heads, int block_size, int num_parts, int part_size, float scale, int window) {
  SHARED_ARRAY(KV_T, keys, TILE * KEY_STRIDE);
  SHARED_ARRAY(KV_T, values, TILE * HEAD_DIM);
  SHARED_ARRAY(float, queries, LARGEST_GROUP * HEAD_DIM);
  SHARED_ARRAY(float, weights, WARPS * TILE);

  const int64_t sequence = blockIdx.x;
  const int kv_head = blockIdx.y, part = blockIdx.z, group = num_heads / num_kv_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int newest = context_lens[sequence] > 0 ? positions[sequence] : -1;
  const int oldest = window > 0 && newest >= window ? newest - window + 1 : 0;
  const int first = oldest + part * part_size, last = min(newest, first + part_size - 1);
  const int64_t first_partial = (sequence * num_heads + kv_head * group) * num_parts + part;  // of query head g: + g * num_parts
  if (first > last) {
    for (int g = threadIdx.x; g < group; g += THREADS) {
      partial_max[first_partial + g * num_parts] = minus_infinity();
      partial_sum[first_partial + g * num_parts] = 0.0f;
    }
    return;
  }

  const ACT_T* const query = qkv + (sequence * (num_heads + 2 * num_kv_heads) + kv_head * group) * HEAD_DIM;
  for (int i = threadIdx.x; i < group * HEAD_DIM; i += THREADS) queries[i] = to_float(query[i]) * (scale * LOG2_E);

  float acc[HEADS_OF_WARP][NUMBERS_OF_LANE], m[HEADS_OF_WARP], l[HEADS_OF_WARP];
#pragma unroll
  for (int j = 0; j < HEADS_OF_WARP; j++) {
    m[j] = minus_infinity();
    l[j] = 0.0f;
#pragma unroll
    for (int e = 0; e < NUMBERS_OF_LANE; e++) acc[j][e] = 0.0f;
  }

  for (int tile = first; tile <= last; tile += TILE) {
    load_tile(key_cache, value_cache, block_tables + sequence * max_blocks, sequence, tile, last, kv_head, num_kv_heads, block_size, keys, values);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < HEADS_OF_WARP; j++) {
      const int g = warp + j * WARPS;
      if (g >= group) break;
      float score = 0.0f;
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += STEP) {
        const Vector<KV_T> key = load16(keys + lane * KEY_STRIDE + d);
#pragma unroll
        for (int i = 0; i < STEP; i++) score += queries[g * HEAD_DIM + d + i] * to_float(key.at[i]);
      }
      if (tile + lane > last) score = minus_infinity();
      const float tile_max = reduce_lanes<Max>(score), new_m = tile_max > m[j] ? tile_max : m[j];
      const float weight = exp2f(score - new_m), shrink = exp2f(m[j] - new_m);
      l[j] = l[j] * shrink + reduce_lanes<Sum>(weight);
      m[j] = new_m;
      weights[warp * TILE + lane] = weight;
      __syncwarp();
#pragma unroll
      for (int e = 0; e < NUMBERS_OF_LANE; e++) {
        const int d = lane + 32 * e;
        if (d < HEAD_DIM) {
          float sum = acc[j][e] * shrink;
          for (int i = 0; i < TILE; i++) sum += weights[warp * TILE + i] * to_float(values[i * HEAD_DIM + d]);
          acc[j][e] = sum;
        }
      }
      __syncwarp();  // the next head overwrites the weights
    }
    __syncthreads();  // the next tile overwrites keys and values
  }

#pragma unroll
  for (int j = 0; j < HEADS_OF_WARP; j++) {
    const int g = warp + j * WARPS;
    if (g >= group) break;
    const int64_t at = first_partial + static_cast<int64_t>(g) * num_parts;
#pragma unroll
    for (int e = 0; e < NUMBERS_OF_LANE; e++) {
      if (lane + 32 * e < HEAD_DIM) partial_out[at * HEAD_DIM + lane + 32 * e] = acc[j][e];
    }
    if (lane == 0) {
      partial_max[at] = m[j];
      partial_sum[at] = l[j];
    }
  }
}
