// Merges two partial softmaxes, each an average and the logarithm of its sum of exponentials. Planted: base 2 for
// logarithms that were taken in base e. No rule of the device is broken: the result is wrong.
#include "device.cuh"

extern "C" __global__ void merge(const float* averages, const float* logs, float* out) {
  const int i = threadIdx.x;
  const float a = logs[2 * i], b = logs[2 * i + 1], top = fmaxf(a, b);
#ifdef PLANTED
  const float p = exp2f(a - top), q = exp2f(b - top);
#else
  const float p = expf(a - top), q = expf(b - top);
#endif
  out[i] = (p * averages[2 * i] + q * averages[2 * i + 1]) / (p + q);
}
