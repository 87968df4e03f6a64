// Chooses one token a row, as backends/sampling.py defines it from step 3 on: greedy, or temperature, min_p, top_k, top_p
// and a draw by inverse CDF.
//
//   logits float32 [rows, vocab_size]   temperature, top_p, min_p float32 [rows]   top_k int32 [rows]
//   seeds uint64, positions, indices int32 [rows]: the key and the counter of the row's random number
//   tokens int32 [rows]: the choice, or -1 for a row with NaN or infinity, -2 for one whose every token is banned
//
// One block a row, nothing sorted. A filter keeps the tokens at or above a floor, and a floor is searched on the floats'
// integer order: seven thresholds cut the range that is left into eight, one pass over the row sums what lies at or
// above each of them, and eleven passes leave one number. Only tokens above the range's lower end cost an exponential,
// so the passes get cheaper. The draw walks the row in id order: warps sum neighbouring ranges, and the warp in whose
// range the sum passes the random number finds the token there, 32 at a time. Sums are float64 in a fixed order.
//
// Random numbers: Philox4x32-10 (Salmon et al., SC'11).
#include "device.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, THRESHOLDS = 7;

__device__ __forceinline__ unsigned philox4x32(uint64_t seed, unsigned position, unsigned index) {
  unsigned c0 = position, c1 = index, c2 = 0, c3 = 0, k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// The tokens that are still kept, and what they weigh: exp of the scaled distance to the best.
struct Kept {
  const float* logits;
  int vocab_size;
  double best, temperature;
  float min_p;
  unsigned floor;  // on the order of logits

  __device__ __forceinline__ double weight(int token) const {
    const float logit = logits[token];
    if (order_of(logit) < floor) return 0.0;
    const double weight = exp((static_cast<double>(logit) - best) / temperature);
    return weight < min_p ? 0.0 : weight;
  }
};

struct Counted {  // every token has mass 1
  __device__ __forceinline__ double operator()(int) const { return 1.0; }
};
struct Weighed {
  Kept kept;
  __device__ __forceinline__ double operator()(int token) const { return kept.weight(token); }
};

// The largest number in low .. high such that the tokens at or above it hold at least `target` of the mass.
// Those at or above `low` are known to.
template <class Mass>
__device__ __forceinline__ unsigned find_floor(const float* logits, int vocab_size, Mass mass, double target, unsigned low, unsigned high) {
  while (low < high) {
    const unsigned step = (high - low) / (THRESHOLDS + 1) + 1;
    double above[THRESHOLDS];
#pragma unroll
    for (int j = 0; j < THRESHOLDS; j++) above[j] = 0.0;
    for (int token = threadIdx.x; token < vocab_size; token += THREADS) {
      const unsigned order = order_of(logits[token]);
      if (order < low + step) continue;
      const double x = mass(token);
#pragma unroll
      for (int j = 0; j < THRESHOLDS; j++) above[j] += order >= low + (j + 1) * step ? x : 0.0;
    }
    unsigned found = low;
#pragma unroll
    for (int j = 0; j < THRESHOLDS; j++) {
      const unsigned threshold = low + (j + 1) * step;
      const double held = reduce_block<Sum>(above[j]);
      if (threshold <= high && held >= target) found = threshold;
    }
    high = min(high, found + step - 1);
    low = found;
  }
  return low;
}

// The first token in id order whose cumulative weight exceeds u times the sum of all; the same for every thread that
// gets one: those of the warp that finds it. Others get -1.
__device__ __forceinline__ int draw(const Kept& kept, double u) {
  SHARED_ARRAY(double, of_warp, WARPS);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int range = (kept.vocab_size + THREADS - 1) / THREADS * 32, begin = warp * range, end = min(begin + range, kept.vocab_size);
  double sum = 0.0;
  for (int token = begin + lane; token < end; token += 32) sum += kept.weight(token);
  sum = reduce_lanes<Sum>(sum);
  if (lane == 0) of_warp[warp] = sum;
  __syncthreads();

  double total = 0.0;
  for (int w = 0; w < WARPS; w++) total += of_warp[w];
  const double target = u * total;
  double before = 0.0, before_chosen = 0.0;
  int chosen = -1;
  for (int w = 0; w < WARPS; w++) {  // the first warp that passes the target, else the last one with any weight
    if (of_warp[w] > 0.0 && (chosen < 0 || before_chosen + of_warp[chosen] <= target)) {
      chosen = w;
      before_chosen = before;
    }
    before += of_warp[w];
  }
  if (warp != chosen) return -1;

  double cumulative = before_chosen;
  int last = -1;  // the last token with a weight, should rounding leave the target just out of reach
  for (int first = begin; first < end; first += 32) {
    const double weight = first + lane < end ? kept.weight(first + lane) : 0.0;
    double prefix = weight;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double left = __shfl_up_sync(ALL_LANES, prefix, step);
      if (lane >= step) prefix += left;
    }
    const unsigned passed = __ballot_sync(ALL_LANES, weight > 0.0 && cumulative + prefix > target);
    if (passed) return first + __ffs(passed) - 1;
    const unsigned weighty = __ballot_sync(ALL_LANES, weight > 0.0);
    if (weighty) last = first + 31 - __clz(weighty);
    cumulative += __shfl_sync(ALL_LANES, prefix, 31);
  }
  return last;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) sample_tokens(
    const float* __restrict__ logits, const float* __restrict__ temperature, const int* __restrict__ top_k, const float* __restrict__ top_p,
    const float* __restrict__ min_p, const uint64_t* __restrict__ seeds, const int* __restrict__ positions, const int* __restrict__ indices,
    int* __restrict__ tokens, int vocab_size) {
  const int64_t row = blockIdx.x;
  const float* const of_row = logits + row * vocab_size;
  const int best = best_token(of_row, vocab_size);
  if (best < 0 || temperature[row] == 0.0f) {
    if (threadIdx.x == 0) tokens[row] = best;
    return;
  }

  const unsigned highest = order_of(of_row[best]);
  Kept kept = {of_row, vocab_size, of_row[best], temperature[row], min_p[row], 0};
  if (top_k[row] > 0 && top_k[row] < vocab_size) {
    kept.floor = find_floor(of_row, vocab_size, Counted{}, top_k[row], 0, highest);
  }
  if (top_p[row] < 1.0f) {
    double sum = 0.0;
    for (int token = threadIdx.x; token < vocab_size; token += THREADS) sum += kept.weight(token);
    const double target = top_p[row] * reduce_block<Sum>(sum);
    kept.floor = find_floor(of_row, vocab_size, Weighed{kept}, target, kept.floor, highest);
  }

  const double u = ((philox4x32(seeds[row], positions[row], indices[row]) >> 8) + 0.5) * (1.0 / 16777216.0);
  const int token = draw(kept, u);
  if (token >= 0 && threadIdx.x % 32 == 0) tokens[row] = token;
}
