// Where a block's row begins in a tensor of more than 2^32 numbers. Planted: blockIdx.x times int, which is unsigned and
// wraps without a word.
#include "device.cuh"

extern "C" __global__ void row_offsets(int64_t* offsets, int stride) {
#ifdef PLANTED
  const int64_t offset = blockIdx.x * stride;  // blamed
#else
  const int64_t offset = static_cast<int64_t>(blockIdx.x) * stride;
#endif
  if (threadIdx.x == 0) offsets[blockIdx.x] = offset;
}
