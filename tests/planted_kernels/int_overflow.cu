// Where a page begins in a pool of more than 2^31 numbers. Planted: int times int.
#include "device.cuh"

extern "C" __global__ void page_offsets(const int* pages, int64_t* offsets, int stride) {
#ifdef PLANTED
  offsets[threadIdx.x] = pages[threadIdx.x] * stride;  // blamed
#else
  offsets[threadIdx.x] = static_cast<int64_t>(pages[threadIdx.x]) * stride;
#endif
}
