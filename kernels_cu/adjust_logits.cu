// What is done to logits before a token is chosen: biases are added, then the penalised rows are penalised, in place.
//
//   logits float32 [rows, vocab_size]
//   bias_start int32 [rows + 1]: entries bias_start[r] .. bias_start[r + 1] of bias_ids int32 and bias_values float32 are row r's
//   penalised uint8 [rows]   repetition, presence, frequency float32 [rows]
//   row_ids int32 [rows]: the row of output_counts int32, in_prompt uint8 [counted_rows, vocab_size]
//
// One block a row. A thread has the tokens of its own residue class in both steps, so nothing needs a barrier, and
// several biases of one token are added in their order. Penalties are float64, rounded once: see backends/sampling.py.
#include "device.cuh"

extern "C" __global__ void adjust_logits(
    float* __restrict__ logits, const int* __restrict__ bias_start, const int* __restrict__ bias_ids, const float* __restrict__ bias_values,
    const uint8_t* __restrict__ penalised, const float* __restrict__ repetition, const float* __restrict__ presence,
    const float* __restrict__ frequency, const int* __restrict__ row_ids, const int* __restrict__ output_counts,
    const uint8_t* __restrict__ in_prompt, int vocab_size) {
  const int64_t row = blockIdx.x;
  float* const of_row = logits + row * vocab_size;
  for (int entry = bias_start[row]; entry < bias_start[row + 1]; entry++) {
    const int token = bias_ids[entry];
    if (token % static_cast<int>(blockDim.x) == static_cast<int>(threadIdx.x)) of_row[token] += bias_values[entry];
  }
  if (!penalised[row]) return;

  const double factor = repetition[row], per_token = presence[row], per_count = frequency[row];
  const int64_t counted = static_cast<int64_t>(row_ids[row]) * vocab_size;
  for (int token = threadIdx.x; token < vocab_size; token += blockDim.x) {
    const int count = output_counts[counted + token];
    if (count == 0 && !in_prompt[counted + token]) continue;
    double logit = of_row[token];
    logit = logit > 0 ? logit / factor : logit * factor;
    of_row[token] = static_cast<float>(logit - per_count * count - per_token * (count > 0));
  }
}
