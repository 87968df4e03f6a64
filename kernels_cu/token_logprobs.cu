// log_softmax of the likeliest tokens of a row of logits: for reports, and for the beams of a search.
//
// token_logprobs    of one given token and of the k likeliest
//   logits float32 [rows, vocab_size]   token_ids int32 [rows]
//   logprobs float32, ranks int32 [rows]: of the given token; its rank is 1 + the number of strictly larger logits
// beam_candidates   of the k likeliest: what a beam may go on with (k is twice the number of beams)
// both
//   top_ids int32, top_logprobs float32 [rows, k]: the likeliest first, equal logits by id; -1 and -infinity past the vocabulary
//
// One block a row; sums are float64. Nothing is sorted: a thread knows the best token of its own share of the row
// (tokens t, t + 256, ...), and the best of all shares is the next of the row; then only its share is searched again,
// by all threads, for what ranks below. A damaged row gets rank, or first id, -1 (NaN or infinity) or -2 (all banned)
// and nothing else; so does a row whose given token is one of these, where nothing could be chosen.
#include "device.cuh"

constexpr int THREADS = 256;

// log of the sum of exp(logit - largest), the same for all threads.
__device__ __forceinline__ double log_sum_of(const float* logits, int vocab_size, double largest) {
  double sum = 0.0;
  for (int token = threadIdx.x; token < vocab_size; token += THREADS) sum += exp(logits[token] - largest);
  return log(reduce_block<Sum>(sum));
}

// The k best tokens of a row, in order; log_total is the log of the sum of exp(logit).
__device__ __forceinline__ void write_top(const float* logits, int vocab_size, int k, double log_total, int* top_ids, float* top_logprobs) {
  uint64_t mine = 0;
  for (int token = threadIdx.x; token < vocab_size; token += THREADS) mine = Max::of(mine, ranked(logits[token], token));
  for (int i = 0; i < k; i++) {
    const uint64_t next = reduce_block<Max>(mine);
    const int token = token_of(next), share = token % THREADS;
    if (threadIdx.x == 0) {
      top_ids[i] = next ? token : -1;
      top_logprobs[i] = next ? static_cast<float>(logits[token] - log_total) : minus_infinity();
    }
    if (next == 0 || i + 1 == k) continue;  // for all threads alike
    uint64_t below = 0;
    for (int other = share + THREADS * threadIdx.x; other < vocab_size; other += THREADS * THREADS) {
      const uint64_t rank = ranked(logits[other], other);
      if (rank < next) below = Max::of(below, rank);
    }
    below = reduce_block<Max>(below);
    if (threadIdx.x == share) mine = below;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) token_logprobs(
    const float* __restrict__ logits, const int* __restrict__ token_ids, float* __restrict__ logprobs, int* __restrict__ ranks,
    int* __restrict__ top_ids, float* __restrict__ top_logprobs, int vocab_size, int k) {
  const int64_t row = blockIdx.x;
  const float* const of_row = logits + row * vocab_size;
  const int best = best_token(of_row, vocab_size), given_token = token_ids[row];
  if (best < 0 || given_token < 0) {
    if (threadIdx.x == 0) ranks[row] = best < 0 ? best : given_token;
    return;
  }
  const double log_total = of_row[best] + log_sum_of(of_row, vocab_size, of_row[best]);
  const float given = of_row[given_token];
  int larger = 0;
  for (int token = threadIdx.x; token < vocab_size; token += THREADS) larger += of_row[token] > given;
  larger = reduce_block<Sum>(larger);
  if (threadIdx.x == 0) {
    logprobs[row] = static_cast<float>(given - log_total);
    ranks[row] = 1 + larger;
  }
  write_top(of_row, vocab_size, k, log_total, top_ids + row * k, top_logprobs + row * k);
}

extern "C" __global__ void __launch_bounds__(THREADS) beam_candidates(
    const float* __restrict__ logits, int* __restrict__ top_ids, float* __restrict__ top_logprobs, int vocab_size, int k) {
  const int64_t row = blockIdx.x;
  const float* const of_row = logits + row * vocab_size;
  const int best = best_token(of_row, vocab_size);
  if (best < 0) {
    if (threadIdx.x == 0 && k > 0) top_ids[row * k] = best;
    return;
  }
  const double log_total = of_row[best] + log_sum_of(of_row, vocab_size, of_row[best]);
  write_top(of_row, vocab_size, k, log_total, top_ids + row * k, top_logprobs + row * k);
}
