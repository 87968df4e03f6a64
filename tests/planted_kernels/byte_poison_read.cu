// Sums a partly filled block of 8-bit floats, which the kernel before it wrote. Planted: the unwritten rest is summed too.
#include "device.cuh"

extern "C" __global__ void write_bytes(const float* x, __nv_fp8_e4m3* block, int length) {
  if (static_cast<int>(threadIdx.x) < length) block[threadIdx.x] = __nv_fp8_e4m3(x[threadIdx.x]);
}

extern "C" __global__ void sum_bytes(const __nv_fp8_e4m3* block, float* out, int length) {
#ifdef PLANTED
  length += 1;
#endif
  float x = 0.0f;
  if (static_cast<int>(threadIdx.x) < length) x = static_cast<float>(block[threadIdx.x]);  // blamed
  const float sum = reduce_lanes<Sum>(x);
  if (threadIdx.x == 0) out[0] = sum;
}
