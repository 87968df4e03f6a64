// Each warp leaves its sum in shared memory, every thread adds them up. Planted: nobody waits for the other warps.
#include "device.cuh"

extern "C" __global__ void block_sum(const float* x, float* out) {
  SHARED_ARRAY(float, of_warp, 4);
  const float sum = reduce_lanes<Sum>(x[threadIdx.x]);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;  // blamed
#ifndef PLANTED
  __syncthreads();
#endif
  float total = 0.0f;
  for (int warp = 0; warp < 4; warp++) total += of_warp[warp];  // blamed
  out[threadIdx.x] = total;
}
