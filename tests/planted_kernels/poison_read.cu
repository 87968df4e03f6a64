// Weighs the slots of a block by the softmax of their scores. Planted: unwritten slots get the weight 0, and 0 times
// whatever is in them is not 0.
#include "device.cuh"

extern "C" __global__ void weighted(const float* weights, const KV_T* values, float* out, int length) {
  const int t = threadIdx.x;
#ifdef PLANTED
  const float part = (t < length ? weights[t] : 0.0f) * to_float(values[t]);  // blamed
#else
  const float part = t < length ? weights[t] * to_float(values[t]) : 0.0f;
#endif
  const float sum = reduce_lanes<Sum>(part);
  if (t == 0) out[0] = sum;
}
