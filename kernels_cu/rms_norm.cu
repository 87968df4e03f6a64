// Root mean square layer normalisation (arXiv 1910.07467): out = x / sqrt(mean(x^2) + eps) * weight, over the last axis.
//
//   x, out [rows, width]   weight float32 [width]
//
// One block a row. The row is read twice, the second time from the cache.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(256) rms_norm(
    const ACT_T* __restrict__ x, const float* __restrict__ weight, ACT_T* __restrict__ out, int width, float eps) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * width;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const float value = to_float(x[begin + i]);
    squares += value * value;
  }
  const float factor = 1.0f / sqrtf(reduce_block<Sum>(squares) / width + eps);
  for (int i = threadIdx.x; i < width; i += blockDim.x) out[begin + i] = from_float<ACT_T>(to_float(x[begin + i]) * factor * weight[i]);
}
