// Rotates queries and keys in place (rotary embedding, arXiv 2104.09864), then writes keys and values to their slots.
//
//   qkv [rows, (num_heads + 2 * num_kv_heads) * head_dim]: the row's query heads, then its key heads, then its values
//   cos, sin float32 [max_positions, head_dim / 2], taken at positions[row]; a pair is (i, i + head_dim / 2)
//   key_cache, value_cache [num_blocks, num_kv_heads, block_size, head_dim]
//   slots int64 [rows]: block * block_size + offset; -1 (a padded lane) writes nothing
//
// One block a row. A thread takes one pair of one head at a time: it rotates it unless it belongs to a value, and
// writes it to the cache unless it belongs to a query.
#include "device.cuh"

extern "C" __global__ void rope_and_cache(
    ACT_T* __restrict__ qkv, const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ positions,
    const int64_t* __restrict__ slots, KV_T* __restrict__ key_cache, KV_T* __restrict__ value_cache,
    int num_heads, int num_kv_heads, int block_size, int head_dim) {
  const int64_t row = blockIdx.x, slot = slots[row], position = positions[row];
  const int half = head_dim / 2, first_value = num_heads + num_kv_heads, heads = first_value + num_kv_heads;
  const int64_t block = slot / block_size;
  const int offset = static_cast<int>(slot % block_size);
  ACT_T* const of_row = qkv + row * heads * head_dim;

  for (int i = threadIdx.x; i < heads * half; i += blockDim.x) {
    const int head = i / half, pair = i % half;
    ACT_T* const x = of_row + head * head_dim + pair;
    if (head < first_value) {
      const float low = to_float(x[0]), high = to_float(x[half]);
      const float c = cos[position * half + pair], s = sin[position * half + pair];
      x[0] = from_float<ACT_T>(low * c - high * s);
      x[half] = from_float<ACT_T>(high * c + low * s);
    }
    if (head >= num_heads && slot >= 0) {
      KV_T* const cache = head < first_value ? key_cache : value_cache;
      const int kv_head = head < first_value ? head - num_heads : head - first_value;
      KV_T* const y = cache + kv_offset(block, kv_head, offset, num_kv_heads, block_size, head_dim) + pair;
      y[0] = from_float<KV_T>(to_float(x[0]));
      y[half] = from_float<KV_T>(to_float(x[half]));
    }
  }
}
