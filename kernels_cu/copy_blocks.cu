// Copies whole blocks of keys and values over all layers: within the pool (copy-on-write), or from one pool to another.
//
//   source_key, source_value [layers, source_blocks, block_elements]   pairs int32 [count, 2] (source, target)
//   target_key, target_value [layers, target_blocks, block_elements]
//
// One launch for everything: a block of threads copies one pair in one layer. A block's unwritten slots are copied as
// they are. Source and target may be the same arrays: no pair's target is another's source.
#include "device.cuh"

// 16 bytes at a time where blocks are made of such pieces, else number by number.
__device__ __forceinline__ void copy_block(const KV_T* source, KV_T* target, int64_t elements) {
  constexpr int step = 16 / sizeof(KV_T);
  if (elements % step == 0) {
    for (int64_t i = threadIdx.x * step; i < elements; i += blockDim.x * step) copy_raw<16>(target + i, source + i);
  } else {
    for (int64_t i = threadIdx.x; i < elements; i += blockDim.x) copy_raw<sizeof(KV_T)>(target + i, source + i);
  }
}

extern "C" __global__ void copy_blocks(
    const KV_T* source_key, const KV_T* source_value, KV_T* target_key, KV_T* target_value, const int* __restrict__ pairs,
    int source_blocks, int target_blocks, int64_t block_elements) {
  const int64_t layer = blockIdx.y, source = pairs[2 * blockIdx.x], target = pairs[2 * blockIdx.x + 1];
  const int64_t from = (layer * source_blocks + source) * block_elements, to = (layer * target_blocks + target) * block_elements;
  copy_block(source_key + from, target_key + to, block_elements);
  copy_block(source_value + from, target_value + to, block_elements);
}
