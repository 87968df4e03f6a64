// What threads do together, copies behind their backs, and functions: small kernels that compare a GPU with the emulator.
#include "device.cuh"

// Of 32 numbers: three shuffles, a ballot and what is read from its bits. out [5, 32]
extern "C" __global__ void lanes(const int* __restrict__ x, int* __restrict__ out, int step) {
  const int lane = threadIdx.x % 32, value = x[lane];
  out[lane] = __shfl_xor_sync(ALL_LANES, value, step);
  out[32 + lane] = __shfl_up_sync(ALL_LANES, value, step);
  out[64 + lane] = __shfl_sync(ALL_LANES, value, step);
  const unsigned votes = __ballot_sync(ALL_LANES, value > 0);
  out[96 + lane] = static_cast<int>(votes);
  out[128 + lane] = __ffs(static_cast<int>(votes)) * 64 + __clz(static_cast<int>(votes));
}

// Sums and maxima of a warp's lanes, in groups of 32 and 4. out [4, 32]
extern "C" __global__ void reduce_of_lanes(const float* __restrict__ x, float* __restrict__ out) {
  const int lane = threadIdx.x % 32;
  const float value = x[lane];
  out[lane] = reduce_lanes<Sum>(value);
  out[32 + lane] = reduce_lanes<Max>(value);
  out[64 + lane] = reduce_lanes<Sum, 4>(value);
  out[96 + lane] = reduce_lanes<Max, 4>(value);
}

// Of a block of `threads` numbers: the sum, the maximum, the largest 64-bit rank, and whether any is negative. out [threads]
extern "C" __global__ void reduce_of_block(
    const float* __restrict__ x, float* __restrict__ sums, float* __restrict__ maxima, int64_t* __restrict__ ranks, int* __restrict__ any) {
  const int i = threadIdx.x;
  const float value = x[i];
  sums[i] = reduce_block<Sum>(value);
  maxima[i] = reduce_block<Max>(value);
  ranks[i] = static_cast<int64_t>(reduce_block<Max>(ranked(value, i)));
  any[i] = __syncthreads_or(value < 0.0f) != 0;
}

// `rounds` rows of 32 * 4 numbers through a ring of three in shared memory, two on their way at a time; odd lanes of
// round `zeroed` ask for zeros. out like x [rounds, 128]
extern "C" __global__ void copies(const int* __restrict__ x, int* __restrict__ out, int rounds, int zeroed) {
  SHARED_ARRAY(int, ring, 3 * 128);
  const int lane = threadIdx.x % 32;
  for (int round = 0; round < 2; round++) {
    if (round < rounds) copy_async16(ring + round * 128 + lane * 4, x + round * 128 + lane * 4, round == zeroed && lane % 2 ? 0 : 16);
    copy_async_commit();
  }
  for (int round = 0; round < rounds; round++) {
    copy_async_wait<1>();
    __syncwarp();
    const int coming = round + 2;
    if (coming < rounds) copy_async16(ring + coming % 3 * 128 + lane * 4, x + coming * 128 + lane * 4, coming == zeroed && lane % 2 ? 0 : 16);
    copy_async_commit();
    const int other = lane ^ 1;  // a neighbour's part: the wait is the whole warp's
#pragma unroll
    for (int i = 0; i < 4; i++) out[round * 128 + other * 4 + i] = ring[round % 3 * 128 + other * 4 + i];
    __syncwarp();
  }
  copy_async_wait<0>();
}

// out [4, count]: 2^x, e^x, the square root of |x|, and 1 / x
extern "C" __global__ void functions(const float* __restrict__ x, float* __restrict__ out, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  out[i] = exp2f(x[i]);
  out[count + i] = expf(x[i]);
  out[2 * count + i] = sqrtf(x[i] < 0.0f ? -x[i] : x[i]);
  out[3 * count + i] = 1.0f / x[i];
}
