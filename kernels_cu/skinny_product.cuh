// Products of a few rows, as decoding has them: as fast as the weights can be read.
//
//   x [rows, in_width], rows at most MOST_ROWS, in_width a multiple of 8   weight [out_width, in_width]
//
// A warp computes two outputs of all rows: its lanes read 16 bytes of each of the two rows of weights at a time, multiply
// them with every row of x, which stays in the cache, and add up at the end. Sums are float32, in a fixed order.
//
// `normed`: what is multiplied is not x but its RMSNorm (rms_norm.cu). Its factor is one number for all of a row, so it
// can wait for the end, where the squares are known too of a warp that has read the row anyway:
//
//   sum of w[k] * (x[k] * factor * norm[k])  =  factor * sum of w[k] * (x[k] * norm[k]),   factor = 1 / sqrt(mean(x^2) + eps)
//
// Nobody waits for another warp, and no normalised row is written or rounded.
#include "device.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32, OUTPUTS = 2, MOST_ROWS = 4;
constexpr int BLOCKS = 8;  // that share a multiprocessor, with 64 registers a thread: so much is on its way from memory at once
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

// Row m of x times weight[j], for all lanes; weight[j] null: none. `norm` float32 [in_width] and `eps` are of the norm.
template <bool normed>
__device__ __forceinline__ void multiply(
    const ACT_T* x, const float* norm, float eps, const WEIGHT_T* const (&weight)[OUTPUTS], int rows, int in_width, float (&products)[MOST_ROWS][OUTPUTS]) {
  float squares[MOST_ROWS];
#pragma unroll
  for (int m = 0; m < MOST_ROWS; m++) {
    squares[m] = 0.0f;
#pragma unroll
    for (int j = 0; j < OUTPUTS; j++) products[m][j] = 0.0f;
  }

  for (int k = threadIdx.x % 32 * STEP; k < in_width; k += 32 * STEP) {
    float w[OUTPUTS][STEP], scale[STEP], row[STEP];
#pragma unroll
    for (int j = 0; j < OUTPUTS; j++) {
      if (weight[j] != nullptr) load_floats(weight[j] + k, w[j]);
    }
    if (normed) load_floats(norm + k, scale);
#pragma unroll
    for (int m = 0; m < MOST_ROWS; m++) {
      if (m >= rows) break;
      load_floats(x + static_cast<int64_t>(m) * in_width + k, row);
      if (normed) {
#pragma unroll
        for (int i = 0; i < STEP; i++) {
          squares[m] += row[i] * row[i];
          row[i] *= scale[i];
        }
      }
#pragma unroll
      for (int j = 0; j < OUTPUTS; j++) {
        if (weight[j] == nullptr) break;
#pragma unroll
        for (int i = 0; i < STEP; i++) products[m][j] += w[j][i] * row[i];
      }
    }
  }

#pragma unroll
  for (int m = 0; m < MOST_ROWS; m++) {
    if (m >= rows) break;
    const float factor = normed ? 1.0f / sqrtf(reduce_lanes<Sum>(squares[m]) / in_width + eps) : 1.0f;
#pragma unroll
    for (int j = 0; j < OUTPUTS; j++) products[m][j] = reduce_lanes<Sum>(products[m][j]) * factor;
  }
}
