// A ring of two stages is filled by cp.async one tile ahead. Planted: the last tile, after which no copy is issued, is
// read while it is still in flight, since one group may be.
#include "device.cuh"

extern "C" __global__ void tile_sums(const float* x, float* out, int tiles) {
  SHARED_ARRAY(float, ring, 2 * 32 * 4);
  auto fetch = [&](int tile) {
    if (tile < tiles) copy_async16(ring + (tile % 2 * 32 + threadIdx.x) * 4, x + (tile * 32 + threadIdx.x) * 4, 16);
#ifdef PLANTED
    if (tile < tiles) copy_async_commit();
#else
    copy_async_commit();
#endif
  };
  fetch(0);
  float sum = 0.0f;
  for (int tile = 0; tile < tiles; tile++) {
    fetch(tile + 1);
    copy_async_wait<1>();
    __syncwarp();
    for (int i = 0; i < 4; i++) sum += ring[(tile % 2 * 32 + 31 - threadIdx.x) * 4 + i];  // blamed
    __syncwarp();
  }
  out[threadIdx.x] = sum;
}
