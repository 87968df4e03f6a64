// out += bias in every row: what a matrix product leaves to do for a model with biases (Qwen2).
//
//   out [rows, width]   bias float32 [width]
#include "device.cuh"

extern "C" __global__ void add_bias(ACT_T* __restrict__ out, const float* __restrict__ bias, int width) {
  const int64_t row = blockIdx.x;
  for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
    out[row * width + i] = from_float<ACT_T>(to_float(out[row * width + i]) + bias[i]);
  }
}
