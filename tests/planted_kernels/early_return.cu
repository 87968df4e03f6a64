// A sum over the block of as many numbers as there are. Planted: threads without a number leave before the barrier.
#include "device.cuh"

extern "C" __global__ void sum_of_some(const float* x, float* out, int count) {
  SHARED_ARRAY(float, of_warp, 4);
  const int i = threadIdx.x;
#ifdef PLANTED
  if (i >= 96 && i >= count) return;
#endif
  const float sum = reduce_lanes<Sum>(i < count ? x[i] : 0.0f);
  if (i % 32 == 0) of_warp[i / 32] = sum;
  __syncthreads();  // blamed
  if (i == 0) {
    float total = 0.0f;
    for (int warp = 0; warp * 32 < count; warp++) total += of_warp[warp];
    out[0] = total;
  }
}
