// Memory alone: reading it as fast as it goes.
#include "device.cuh"

__device__ __forceinline__ int mixed(const Vector<int>& x) { return x.at[0] ^ x.at[1] ^ x.at[2] ^ x.at[3]; }

// Reads all of x, `count` vectors of 16 bytes, UNROLL of them on their way at a time in every thread. The sum is written where it
// is a number that it hardly ever is, so that no load is left out.
extern "C" __global__ void __launch_bounds__(256) read_only(const int* __restrict__ x, int* __restrict__ out, int64_t count, int blocks) {
  const int64_t step = static_cast<int64_t>(blocks) * 256;
  int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  int sum = 0;
  for (; i + (UNROLL - 1) * step < count; i += UNROLL * step) {
    Vector<int> ahead[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) ahead[u] = load16(x + 4 * (i + u * step));
#pragma unroll
    for (int u = 0; u < UNROLL; u++) sum ^= mixed(ahead[u]);
  }
  for (; i < count; i += step) sum ^= mixed(load16(x + 4 * i));
  if (sum == 0x5bd1e995) out[0] = sum;
}
