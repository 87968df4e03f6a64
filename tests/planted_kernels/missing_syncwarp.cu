// A warp turns its numbers round through shared memory, again and again. Planted: lanes read what others still write.
#include "device.cuh"

#ifdef PLANTED
#define WAIT_FOR_LANES()
#else
#define WAIT_FOR_LANES() __syncwarp()
#endif

extern "C" __global__ void rotations(const float* x, float* out, int times) {
  SHARED_ARRAY(float, lanes, 64);
  float* mine = lanes + threadIdx.x / 32 * 32;
  const int lane = threadIdx.x % 32;
  float value = x[threadIdx.x];
  for (int i = 0; i < times; i++) {
    mine[lane] = value;  // blamed
    WAIT_FOR_LANES();
    value = mine[(lane + 1) % 32];  // blamed
    WAIT_FOR_LANES();
  }
  out[threadIdx.x] = value;
}
