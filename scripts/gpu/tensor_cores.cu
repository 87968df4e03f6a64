// The tensor cores' instructions, one warp each, to compare a GPU with the emulator.
#include "device.cuh"

// Four 8 x 8 matrices of 16-bit numbers, row r of matrix m at row m * 8 + r of x [32, 8]; as they are, and transposed. out [2, 4, 32]
extern "C" __global__ void matrices(const ACT_T* __restrict__ x, int* __restrict__ out) {
  SHARED_ARRAY(ACT_T, rows, 32 * 8);
  const int lane = threadIdx.x % 32;
  store16(rows + lane * 8, load16(x + lane * 8));
  __syncwarp();
  unsigned plain[4], transposed[4];
  load_matrices_x4(plain, rows + lane * 8);
  load_matrices_x4_transposed(transposed, rows + lane * 8);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    out[i * 32 + lane] = static_cast<int>(plain[i]);
    out[(4 + i) * 32 + lane] = static_cast<int>(transposed[i]);
  }
}

// One product on tensor cores, fragments as they are: a [32, 8], b [32, 4] 16-bit numbers, c and d [32, 4] float32.
extern "C" __global__ void product(const ACT_T* __restrict__ a, const ACT_T* __restrict__ b, const float* __restrict__ c, float* __restrict__ d) {
  const int lane = threadIdx.x % 32;
  unsigned left[4], right[2];
  float sum[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    left[i] = load_pair(a + lane * 8 + 2 * i);
    sum[i] = c[lane * 4 + i];
  }
#pragma unroll
  for (int i = 0; i < 2; i++) right[i] = load_pair(b + lane * 4 + 2 * i);
  mma_m16n8k16<ACT_T>(sum, left, right);
#pragma unroll
  for (int i = 0; i < 4; i++) d[lane * 4 + i] = sum[i];
}
