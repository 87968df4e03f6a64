// Numbers to compute on.
#include "device.cuh"

// x[i] = a number of -1 .. 1 that depends on i and the seed alone.
extern "C" __global__ void fill(__nv_bfloat16* __restrict__ x, int64_t count, int blocks, int seed) {
  const int64_t step = static_cast<int64_t>(blocks) * 256;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < count; i += step) {
    unsigned h = static_cast<unsigned>(i) * 0x9E3779B1u ^ static_cast<unsigned>(i >> 32) * 0x85EBCA77u ^ static_cast<unsigned>(seed);
    h ^= h >> 16;
    h *= 0x7FEB352Du;
    h ^= h >> 15;
    h *= 0x846CA68Bu;
    h ^= h >> 16;
    x[i] = from_float<__nv_bfloat16>(static_cast<int>(h >> 8) * (1.0f / 8388608.0f) - 1.0f);
  }
}
