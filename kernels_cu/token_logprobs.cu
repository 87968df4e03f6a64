// log_softmax of one given token and of the k likeliest, a row of logits each.
//
//   logits float32 [rows, vocab_size]   token_ids int32 [rows]
//   logprobs float32, ranks int32 [rows]: of the given token; its rank is 1 + the number of strictly larger logits
//   top_ids int32, top_logprobs float32 [rows, k]: the likeliest first, equal logits by id; -1 and -infinity past the vocabulary
//
// One block a row; sums are float64. The k likeliest are found one after the other: each pass takes the best token that
// ranks below the one before, so k may be anything and nothing is sorted. A damaged row gets rank -1 (NaN or infinity)
// or -2 (all banned) and nothing else.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(256) token_logprobs(
    const float* __restrict__ logits, const int* __restrict__ token_ids, float* __restrict__ logprobs, int* __restrict__ ranks,
    int* __restrict__ top_ids, float* __restrict__ top_logprobs, int vocab_size, int k) {
  const int64_t row = blockIdx.x;
  const float* const of_row = logits + row * vocab_size;
  const int best = best_token(of_row, vocab_size);
  if (best < 0) {
    if (threadIdx.x == 0) ranks[row] = best;
    return;
  }

  const double largest = of_row[best];
  const float given = of_row[token_ids[row]];
  double sum = 0.0;
  int larger = 0;
  for (int token = threadIdx.x; token < vocab_size; token += blockDim.x) {
    sum += exp(of_row[token] - largest);
    larger += of_row[token] > given;
  }
  const double log_sum = log(reduce_block<Sum>(sum));
  larger = reduce_block<Sum>(larger);
  if (threadIdx.x == 0) {
    logprobs[row] = static_cast<float>(given - largest - log_sum);
    ranks[row] = 1 + larger;
  }

  uint64_t before = ~0ull;
  for (int i = 0; i < k; i++) {
    uint64_t next = 0;
    for (int token = threadIdx.x; token < vocab_size; token += blockDim.x) {
      const uint64_t rank = ranked(of_row[token], token);
      if (rank < before) next = Max::of(next, rank);
    }
    before = reduce_block<Max>(next);
    if (threadIdx.x == 0) {
      const int token = token_of(before);
      top_ids[row * k + i] = before ? token : -1;
      top_logprobs[row * k + i] = before ? static_cast<float>(of_row[token] - largest - log_sum) : minus_infinity();
    }
  }
}
