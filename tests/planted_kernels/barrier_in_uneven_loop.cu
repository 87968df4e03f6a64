// Adds a number to each element, with barriers between the rounds. Planted: the loop's barrier is reached by those that
// still have an element, while the others are past it, at the next barrier.
#include "device.cuh"

extern "C" __global__ void rounds(const float* x, float* out, int count) {
#ifdef PLANTED
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    out[i] = x[i] + 1.0f;
    __syncthreads();  // blamed
  }
#else
  for (int first = 0; first < count; first += blockDim.x) {
    const int i = first + threadIdx.x;
    if (i < count) out[i] = x[i] + 1.0f;
    __syncthreads();
  }
#endif
  __syncthreads();  // blamed
}
