// Sums a sequence's values through its block table. Planted: one token too many, which lies in an unwritten slot or, at
// a block's end, behind the table entry -1.
#include "device.cuh"

extern "C" __global__ void paged_sums(
    const KV_T* pool, const int* table, const int* lengths, float* out, int max_blocks, int block_size) {
  const int length = lengths[blockIdx.x];
#ifdef PLANTED
  const int end = length + 1;
#else
  const int end = length;
#endif
  float sum = 0.0f;
  for (int t = threadIdx.x; t < end; t += 32) {
    const int64_t block = table[blockIdx.x * max_blocks + t / block_size];
    sum += to_float(pool[block * block_size + t % block_size]);  // blamed
  }
  sum = reduce_lanes<Sum>(sum);
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
