// Copies a block of which some slots were never written. Planted: through a load of each number, which is a use.
#include "device.cuh"

extern "C" __global__ void copy_block(const KV_T* source, KV_T* target) {
#ifdef PLANTED
  target[threadIdx.x] = source[threadIdx.x];  // blamed
#else
  copy_raw<sizeof(KV_T)>(target + threadIdx.x, source + threadIdx.x);
#endif
}
