// out = silu(gate) * up with silu(x) = x / (1 + exp(-x)) (arXiv 2002.05202).
//
//   gate_up [rows, 2 * width]: the gate's half first   out [rows, width]
#include "device.cuh"

extern "C" __global__ void silu_mul(const ACT_T* __restrict__ gate_up, ACT_T* __restrict__ out, int width) {
  const int64_t row = blockIdx.x;
  const ACT_T* const gate = gate_up + row * 2 * width;
  for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
    const float x = to_float(gate[i]);
    out[row * width + i] = from_float<ACT_T>(x / (1.0f + expf(-x)) * to_float(gate[width + i]));  // exp may be infinite: x / inf = 0
  }
}
