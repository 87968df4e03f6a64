// out = x @ weight^T + bias, or out += it, for a few rows of x; NORMED 1: of rms_norm(x), in the same launch.
//
//   x [rows, in_width], rows at most 4   norm float32 [in_width] and eps: of the norm; [0] where there is none
//   weight [out_width, in_width]   bias float32 [out_width], or of no numbers   out [rows, out_width]
//
// A warp computes two neighbouring outputs; how is in skinny_product.cuh.
#include "skinny_product.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) skinny_matmul(
    const ACT_T* __restrict__ x, const float* __restrict__ norm, const WEIGHT_T* __restrict__ weight, const float* __restrict__ bias,
    OUT_T* __restrict__ out, int rows, int in_width, int out_width, int num_biases, float eps, int add) {
  const int lane = threadIdx.x % 32, first = (blockIdx.x * WARPS + threadIdx.x / 32) * OUTPUTS;
  const WEIGHT_T* of_output[OUTPUTS];  // none behind the last
#pragma unroll
  for (int j = 0; j < OUTPUTS; j++) of_output[j] = first + j < out_width ? weight + static_cast<int64_t>(first + j) * in_width : nullptr;

  float products[MOST_ROWS][OUTPUTS];
  multiply<NORMED != 0>(x, norm, eps, of_output, rows, in_width, products);

#pragma unroll
  for (int m = 0; m < MOST_ROWS; m++) {
#pragma unroll
    for (int j = 0; j < OUTPUTS; j++) {
      if (lane == 0 && m < rows && of_output[j] != nullptr) {
        OUT_T& result = out[static_cast<int64_t>(m) * out_width + first + j];
        float total = products[m][j];
        if (num_biases > 0) total += bias[first + j];
        if (add) total += to_float(result);
        result = from_float<OUT_T>(total);
      }
    }
  }
}
