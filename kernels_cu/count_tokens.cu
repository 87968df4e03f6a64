// Counts the chosen token of every penalised row: output_counts[row_ids[r], tokens[r]] += 1.
//
//   tokens, row_ids int32 [rows]   penalised uint8 [rows]   output_counts int32 [counted_rows, vocab_size]
//
// A row without a choice (a negative token) counts nothing.
#include "device.cuh"

extern "C" __global__ void count_tokens(
    const int* __restrict__ tokens, const int* __restrict__ row_ids, const uint8_t* __restrict__ penalised, int* __restrict__ output_counts,
    int rows, int vocab_size) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < rows && penalised[row] && tokens[row] >= 0) {
    atomicAdd(output_counts + static_cast<int64_t>(row_ids[row]) * vocab_size + tokens[row], 1);
  }
}
