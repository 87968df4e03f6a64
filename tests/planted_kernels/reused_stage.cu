// Two warps share a tile that one of them fetches by cp.async. Planted: the next tile is fetched into the stage that the
// other warp still reads.
#include "device.cuh"

extern "C" __global__ void shared_tiles(const float* x, float* out, int tiles) {
  SHARED_ARRAY(float, stage, 32 * 4);
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
  for (int tile = 0; tile < tiles; tile++) {
    if (threadIdx.x < 32) copy_async16(stage + lane * 4, x + (tile * 32 + lane) * 4, 16);  // blamed
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    for (int i = 0; i < 4; i++) sum += stage[lane * 4 + i];  // blamed
#ifndef PLANTED
    __syncthreads();
#endif
  }
  out[threadIdx.x] = sum;
}
