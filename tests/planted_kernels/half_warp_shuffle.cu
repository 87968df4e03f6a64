// Adds up the lower half of a warp. Planted: the mask names all lanes, and the upper half never comes.
#include "device.cuh"

extern "C" __global__ void half_sum(const float* x, float* out) {
#ifdef PLANTED
  if (threadIdx.x >= 16) return;
  const float value = x[threadIdx.x];
#else
  const float value = threadIdx.x < 16 ? x[threadIdx.x] : 0.0f;
#endif
  float sum = value;
  for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);  // blamed
  if (threadIdx.x == 0) out[0] = sum;
}
