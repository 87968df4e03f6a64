// Sums rows 16 bytes at a time. Planted: rows of 6 numbers do not begin at multiples of 16 bytes.
#include "device.cuh"

extern "C" __global__ void row_sums(const float* x, float* out, int stride) {
#ifdef PLANTED
  const float* row = x + blockIdx.x * stride / 8 * 6;
#else
  const float* row = x + blockIdx.x * stride;
#endif
  const Vector<float> numbers = load16(row);  // blamed
  float sum = 0.0f;
  for (int i = 0; i < 4; i++) sum += numbers.at[i];
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
