// Counts by atomics. Planted: one thread counts by hand.
#include "device.cuh"

extern "C" __global__ void count(int* counter) {
#ifdef PLANTED
  if (threadIdx.x == 40) {
    counter[0] += 1;  // blamed
    return;
  }
#endif
  atomicAdd(counter, 1);  // blamed
}
