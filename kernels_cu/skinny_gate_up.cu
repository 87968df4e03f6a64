// out = silu(gate) * up, where gate and up are the two halves of rms_norm(x) @ weight^T + bias: half of a layer's MLP in
// one launch, for a few rows of x.
//
//   x [rows, in_width], rows at most 4   norm float32 [in_width] and eps: of the norm
//   weight [2 * width, in_width]: the gate's half first   bias float32 [2 * width], or of no numbers   out [rows, width]
//
// A warp computes one column of the gate and the same one of up, so both meet in its registers; how is in
// skinny_product.cuh. silu(x) = x / (1 + exp(-x)), as in silu_mul.cu.
#include "skinny_product.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) skinny_gate_up(
    const ACT_T* __restrict__ x, const float* __restrict__ norm, const WEIGHT_T* __restrict__ weight, const float* __restrict__ bias,
    OUT_T* __restrict__ out, int rows, int in_width, int width, int num_biases, float eps) {
  const int lane = threadIdx.x % 32, column = blockIdx.x * WARPS + threadIdx.x / 32;
  const bool there = column < width;  // the last block may have warps behind the last column
  const int64_t half = static_cast<int64_t>(width) * in_width;
  const WEIGHT_T* const of_gate = weight + static_cast<int64_t>(column) * in_width;
  const WEIGHT_T* const of_both[OUTPUTS] = {there ? of_gate : nullptr, there ? of_gate + half : nullptr};

  float products[MOST_ROWS][OUTPUTS];
  multiply<true>(x, norm, eps, of_both, rows, in_width, products);

#pragma unroll
  for (int m = 0; m < MOST_ROWS; m++) {
    if (lane == 0 && there && m < rows) {
      float gate = products[m][0], up = products[m][1];
      if (num_biases > 0) {
        gate += bias[column];
        up += bias[width + column];
      }
      out[static_cast<int64_t>(m) * width + column] = from_float<OUT_T>(gate / (1.0f + expf(-gate)) * up);  // exp may be infinite: gate / inf = 0
    }
  }
}
