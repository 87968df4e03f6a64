// Scatters rows to their slots, one block a row. Planted: the slots of two rows are computed to be the same.
#include "device.cuh"

extern "C" __global__ void scatter(const float* rows, const int64_t* slots, float* pool, int width) {
#ifdef PLANTED
  const int64_t slot = slots[blockIdx.x / 2];
#else
  const int64_t slot = slots[blockIdx.x];
#endif
  const float* row = rows + static_cast<int64_t>(blockIdx.x) * width;
  for (int i = threadIdx.x; i < width; i += blockDim.x) pool[slot * width + i] = row[i];  // blamed
}
