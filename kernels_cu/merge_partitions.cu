// The second pass of an attention whose context was cut into partitions: their results put together.
//
//   partial_out float32 [rows, num_heads, num_parts, head_dim]   partial_max, partial_sum float32 [rows, num_heads, num_parts]
//   out [rows, num_heads * head_dim]
//
//   out = sum of O_i * 2^(m_i - m) / sum of l_i * 2^(m_i - m),   m the largest of the m_i: no power is above 1
//
// where O_i is partition i's unnormalised output, m_i its largest score in units of log2 and l_i its sum of
// 2^(score - m_i). A partition without positions has l_i = 0, and then its O_i was never written. One block a row and head.
#include "device.cuh"

extern "C" __global__ void merge_partitions(
    const float* __restrict__ partial_out, const float* __restrict__ partial_max, const float* __restrict__ partial_sum,
    ACT_T* __restrict__ out, int num_heads, int num_parts, int head_dim) {
  const int64_t row_head = static_cast<int64_t>(blockIdx.x) * num_heads + blockIdx.y, begin = row_head * num_parts;
  float m = minus_infinity(), l = 0.0f;
  for (int i = 0; i < num_parts; i++) m = fmaxf(m, partial_max[begin + i]);
  for (int i = 0; i < num_parts; i++) {
    const float sum = partial_sum[begin + i];
    if (sum > 0.0f) l += sum * exp2f(partial_max[begin + i] - m);
  }
  for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
    float acc = 0.0f;
    for (int i = 0; i < num_parts; i++) {
      if (partial_sum[begin + i] > 0.0f) acc += partial_out[(begin + i) * head_dim + d] * exp2f(partial_max[begin + i] - m);
    }
    out[row_head * head_dim + d] = from_float<ACT_T>(l > 0.0f ? acc / l : 0.0f);
  }
}
