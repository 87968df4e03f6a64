// Adds neighbours in the lower half of a warp. Planted: the mask is the other half's.
#include "device.cuh"

extern "C" __global__ void neighbours(const float* x, float* out) {
  if (threadIdx.x < 16) {
#ifdef PLANTED
    const unsigned mask = 0xffff0000u;
#else
    const unsigned mask = 0x0000ffffu;
#endif
    const float value = x[threadIdx.x];
    out[threadIdx.x] = value + __shfl_xor_sync(mask, value, 1);  // blamed
  }
}
