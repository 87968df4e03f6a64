// Attention over the paged cache, the readable form: one block of threads for every row and query head.
//
//   qkv [rows, (num_heads + 2 * num_kv_heads) * head_dim], of which the query heads are read; out [rows, num_heads * head_dim]
//   key_cache, value_cache [num_blocks, num_kv_heads, block_size, head_dim]
//   block_tables int32 [num_seqs, max_blocks]   query_start int32 [num_seqs + 1]   context_lens int32 [num_seqs]
//   positions int32 [rows]
//
// The row at position p sees positions max(0, p - window + 1) .. p of its own sequence (window 0: from 0), decode and
// prefill alike. They are taken in tiles of one position a thread:
//
//   1. a thread scores its position: q . k * scale, or -inf past the end
//   2. the running maximum m and sum l of exp(score - m) are brought up to date (online softmax, arXiv 1805.02867)
//   3. the threads change sides and own one number of the output each: acc = acc * exp(old m - m) + sum of weight * v
//
// Any head_dim, block size and group; a row of no sequence, or of one without context, gets zeros. Nothing outside
// the window is touched: its blocks may be gone, and a slot past the context may hold NaN. After vLLM's first kernel
// (arXiv 2309.06180, section 5.1), whose scores of a whole context lie in shared memory; here a tile's do.
#include "device.cuh"

constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS) paged_attention_v1(
    const ACT_T* __restrict__ qkv, const KV_T* __restrict__ key_cache, const KV_T* __restrict__ value_cache,
    const int* __restrict__ block_tables, const int* __restrict__ query_start, const int* __restrict__ context_lens,
    const int* __restrict__ positions, ACT_T* __restrict__ out, int num_seqs, int max_blocks, int num_heads, int num_kv_heads,
    int block_size, int head_dim, float scale, int window) {
  DYNAMIC_SHARED(float, shared);
  float* const query = shared;             // [head_dim], scaled
  float* const acc = query + head_dim;     // [head_dim]
  float* const weights = acc + head_dim;   // [THREADS]

  const int row = blockIdx.x, head = blockIdx.y, kv_head = head / (num_heads / num_kv_heads);
  const int sequence = sequence_of_row(query_start, num_seqs, row);
  const bool live = sequence < num_seqs && context_lens[sequence] > 0;
  const int last = live ? positions[row] : -1;
  const int first = window > 0 && last >= window ? last - window + 1 : 0;
  const int* const table = block_tables + static_cast<int64_t>(live ? sequence : 0) * max_blocks;

  const int64_t row_width = static_cast<int64_t>(num_heads + 2 * num_kv_heads) * head_dim;
  for (int d = threadIdx.x; d < head_dim; d += THREADS) {
    query[d] = to_float(qkv[row * row_width + head * head_dim + d]) * scale;
    acc[d] = 0.0f;
  }
  __syncthreads();

  float m = minus_infinity(), l = 0.0f;
  for (int tile = first; tile <= last; tile += THREADS) {
    const int position = tile + threadIdx.x;
    float score = minus_infinity();
    if (position <= last) {
      const KV_T* const key = key_cache + kv_offset(table[position / block_size], kv_head, position % block_size, num_kv_heads, block_size, head_dim);
      score = 0.0f;
      for (int d = 0; d < head_dim; d++) score += query[d] * to_float(key[d]);
    }
    const float tile_max = reduce_block<Max>(score), new_m = tile_max > m ? tile_max : m;
    const float weight = expf(score - new_m), shrink = expf(m - new_m);
    weights[threadIdx.x] = weight;
    l = l * shrink + reduce_block<Sum>(weight);  // its barriers also publish the weights
    m = new_m;

    const int count = min(THREADS, last - tile + 1);
    for (int d = threadIdx.x; d < head_dim; d += THREADS) {
      float sum = acc[d] * shrink;
      for (int i = 0; i < count; i++) {
        const int at = tile + i;
        sum += weights[i] * to_float(value_cache[kv_offset(table[at / block_size], kv_head, at % block_size, num_kv_heads, block_size, head_dim) + d]);
      }
      acc[d] = sum;
    }
    __syncthreads();  // the next tile overwrites the weights
  }

  ACT_T* const result = out + (static_cast<int64_t>(row) * num_heads + head) * head_dim;
  for (int d = threadIdx.x; d < head_dim; d += THREADS) result[d] = from_float<ACT_T>(live ? acc[d] / l : 0.0f);
}
