// out[r] = table[rows[r]]: the embedding of tokens, and the choice of the rows whose logits are wanted.
//
//   table [num_rows, width]   rows int32 [count]   out [count, width]
//
// One row of blocks a row; neighbouring threads copy neighbouring numbers, widened or rounded where the types differ.
#include "device.cuh"

extern "C" __global__ void gather_rows(const WEIGHT_T* __restrict__ table, const int* __restrict__ rows, ACT_T* __restrict__ out, int width) {
  const int64_t row = blockIdx.x, source = rows[row];
  for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
    out[row * width + i] = from_float<ACT_T>(to_float(table[source * width + i]));
  }
}
