// Puts tokens that the host has not read yet into a step: token_ids[t] = chosen[sources[t]] where sources[t] >= 0.
//
//   sources int32 [rows]   chosen int32 [num_chosen], what the step before has chosen   token_ids int32 [rows]
//
// A choice that failed is a negative number. It becomes token 0 here: whoever reads the step before sees what happened.
#include "device.cuh"

extern "C" __global__ void fill_tokens(const int* __restrict__ sources, const int* __restrict__ chosen, int* __restrict__ token_ids, int rows) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < rows && sources[row] >= 0) token_ids[row] = max(chosen[sources[row]], 0);
}
