// out = x @ weight^T + bias, or out += it, for a few rows of x, as decoding has them: as fast as the weights can be read.
//
//   x [rows, in_width], rows at most 4   weight [out_width, in_width]   bias float32 [out_width], or of no numbers
//   out [rows, out_width]
//
// in_width is a multiple of 8. A warp computes two neighbouring outputs of all rows: its lanes read 16 bytes of each of
// the two rows of weights at a time, multiply them with every row of x, which stays in the cache, and add up at the end.
// Sums are float32, in a fixed order.
#include "device.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32, OUTPUTS = 2, MOST_ROWS = 4;
constexpr int STEP = Vector<WEIGHT_T>::size > Vector<ACT_T>::size ? Vector<WEIGHT_T>::size : Vector<ACT_T>::size;

template <class type>
__device__ __forceinline__ void load_floats(const type* from, float (&to)[STEP]) {
#pragma unroll
  for (int i = 0; i < STEP; i += Vector<type>::size) {
    const Vector<type> x = load16(from + i);
#pragma unroll
    for (int j = 0; j < Vector<type>::size; j++) to[i + j] = to_float(x.at[j]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) skinny_matmul(
    const ACT_T* __restrict__ x, const WEIGHT_T* __restrict__ weight, const float* __restrict__ bias, OUT_T* __restrict__ out,
    int rows, int in_width, int out_width, int num_biases, int add) {
  const int lane = threadIdx.x % 32, first = (blockIdx.x * WARPS + threadIdx.x / 32) * OUTPUTS;
  const int outputs = min(OUTPUTS, out_width - first);  // of this warp; none behind the last
  float sum[MOST_ROWS][OUTPUTS];
#pragma unroll
  for (int m = 0; m < MOST_ROWS; m++) {
#pragma unroll
    for (int j = 0; j < OUTPUTS; j++) sum[m][j] = 0.0f;
  }

  for (int k = lane * STEP; k < in_width; k += 32 * STEP) {
    float w[OUTPUTS][STEP], row[STEP];
#pragma unroll
    for (int j = 0; j < OUTPUTS; j++) {
      if (j < outputs) load_floats(weight + static_cast<int64_t>(first + j) * in_width + k, w[j]);
    }
#pragma unroll
    for (int m = 0; m < MOST_ROWS; m++) {
      if (m >= rows) break;
      load_floats(x + static_cast<int64_t>(m) * in_width + k, row);
#pragma unroll
      for (int j = 0; j < OUTPUTS; j++) {
        if (j >= outputs) break;
#pragma unroll
        for (int i = 0; i < STEP; i++) sum[m][j] += w[j][i] * row[i];
      }
    }
  }

#pragma unroll
  for (int m = 0; m < MOST_ROWS; m++) {
#pragma unroll
    for (int j = 0; j < OUTPUTS; j++) {
      float total = reduce_lanes<Sum>(sum[m][j]);
      if (lane == 0 && m < rows && j < outputs) {
        OUT_T& result = out[static_cast<int64_t>(m) * out_width + first + j];
        if (num_biases > 0) total += bias[first + j];
        if (add) total += to_float(result);
        result = from_float<OUT_T>(total);
      }
    }
  }
}
