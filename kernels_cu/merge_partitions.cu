// The second pass of an attention whose context was cut into parts: their results put together.
//
//   out = sum of O_i * 2^(m_i - m) / sum of l_i * 2^(m_i - m),   m the largest of the m_i: no power is above 1
//
// where O_i is part i's unnormalised output, m_i its largest score in units of log2 and l_i its sum of 2^(score - m_i).
// A part without positions has l_i = 0, and then its O_i was never written. One block a row and query head.
//
// merge_partitions   after paged_attention_v2.cu: num_parts for every row and head
//   partial_out float32 [rows, num_heads, num_parts, head_dim]   partial_max, partial_sum float32 [rows, num_heads, num_parts]
// merge_items        after paged_decode.cu: parts part_start[p] .. part_start[p + 1] for pair p = row * num_kv_heads + kv_head
//   partial_out float32 [max_parts, group, head_dim]   partial_max, partial_sum float32 [max_parts, group]
// both
//   out [rows, num_heads * head_dim]
#include "device.cuh"

// Parts first, first + step, ..., `count` of them.
__device__ __forceinline__ void merge(
    const float* partial_out, const float* partial_max, const float* partial_sum, int64_t first, int count, int step, int head_dim, ACT_T* out) {
  float m = minus_infinity(), l = 0.0f;
  for (int i = 0; i < count; i++) m = fmaxf(m, partial_max[first + i * step]);
  for (int i = 0; i < count; i++) {
    const float sum = partial_sum[first + i * step];
    if (sum > 0.0f) l += sum * exp2f(partial_max[first + i * step] - m);
  }
  for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
    float acc = 0.0f;
    for (int i = 0; i < count; i++) {
      const int64_t part = first + i * step;
      if (partial_sum[part] > 0.0f) acc += partial_out[part * head_dim + d] * exp2f(partial_max[part] - m);
    }
    out[d] = from_float<ACT_T>(l > 0.0f ? acc / l : 0.0f);
  }
}

extern "C" __global__ void merge_partitions(
    const float* __restrict__ partial_out, const float* __restrict__ partial_max, const float* __restrict__ partial_sum,
    ACT_T* __restrict__ out, int num_heads, int num_parts, int head_dim) {
  const int64_t row_head = static_cast<int64_t>(blockIdx.x) * num_heads + blockIdx.y;
  merge(partial_out, partial_max, partial_sum, row_head * num_parts, num_parts, 1, head_dim, out + row_head * head_dim);
}

extern "C" __global__ void merge_items(
    const float* __restrict__ partial_out, const float* __restrict__ partial_max, const float* __restrict__ partial_sum,
    const int* __restrict__ part_start, ACT_T* __restrict__ out, int num_heads, int num_kv_heads, int head_dim) {
  const int group = num_heads / num_kv_heads, head = blockIdx.y;
  const int64_t row = blockIdx.x, pair = row * num_kv_heads + head / group;
  const int begin = part_start[pair], count = part_start[pair + 1] - begin;
  merge(partial_out, partial_max, partial_sum, static_cast<int64_t>(begin) * group + head % group, count, group, head_dim,
        out + (row * num_heads + head) * head_dim);
}
