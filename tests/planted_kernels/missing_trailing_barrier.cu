// Tiles pass through one shared buffer, and each thread reads its neighbour's number. Planted: a fast warp fills the
// buffer with the next tile while a slow one still reads this tile.
#include "device.cuh"

extern "C" __global__ void reversed_sums(const float* x, float* out, int tiles) {
  SHARED_ARRAY(float, tile, 128);
  float sum = 0.0f;
  for (int i = 0; i < tiles; i++) {
    tile[threadIdx.x] = x[i * 128 + threadIdx.x];  // blamed
    __syncthreads();
    sum += tile[127 - threadIdx.x];  // blamed
#ifndef PLANTED
    __syncthreads();
#endif
  }
  out[threadIdx.x] = sum;
}
