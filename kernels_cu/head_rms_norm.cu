// Normalises every query head and every key head in place (Qwen3); see rms_norm.cu for the formula.
//
//   qkv [rows, (num_heads + 2 * num_kv_heads) * head_dim]: the row's query heads, then its key heads, then its values
//   q_weight, k_weight float32 [head_dim]
//
// One warp a head.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(32) head_rms_norm(
    ACT_T* __restrict__ qkv, const float* __restrict__ q_weight, const float* __restrict__ k_weight,
    int num_heads, int num_kv_heads, int head_dim, float eps) {
  const int head = blockIdx.y;
  const int64_t row_width = static_cast<int64_t>(num_heads + 2 * num_kv_heads) * head_dim;
  ACT_T* const x = qkv + blockIdx.x * row_width + head * head_dim;
  const float* const weight = head < num_heads ? q_weight : k_weight;

  float squares = 0.0f;
  for (int i = threadIdx.x; i < head_dim; i += 32) squares += to_float(x[i]) * to_float(x[i]);
  const float factor = 1.0f / sqrtf(reduce_lanes<Sum>(squares) / head_dim + eps);
  for (int i = threadIdx.x; i < head_dim; i += 32) x[i] = from_float<ACT_T>(to_float(x[i]) * factor * weight[i]);
}
