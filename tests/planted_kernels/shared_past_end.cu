// Differences of neighbours. Planted: the last thread's neighbour lies past the array.
#include "device.cuh"

extern "C" __global__ void differences(const float* x, float* out) {
  SHARED_ARRAY(float, numbers, 64);
  SHARED_ARRAY(float, others, 64);
  numbers[threadIdx.x] = x[threadIdx.x];
  others[threadIdx.x] = 0.0f;
  __syncthreads();
#ifdef PLANTED
  const bool has_neighbour = true;
#else
  const bool has_neighbour = threadIdx.x < 63;
#endif
  const float next = has_neighbour ? numbers[threadIdx.x + 1] : numbers[threadIdx.x];  // blamed
  out[threadIdx.x] = next - numbers[threadIdx.x] + others[threadIdx.x];
}
