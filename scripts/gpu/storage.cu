// Numbers to and from the types they are stored in, to compare a GPU with the emulator.
#include "device.cuh"

// float32 -> a stored type and back. stored, back [count]
extern "C" __global__ void to_storage(const float* __restrict__ x, KV_T* __restrict__ stored, float* __restrict__ back, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const KV_T value = from_float<KV_T>(x[i]);
  stored[i] = value;
  back[i] = to_float(value);
}

// Every bit pattern of a stored type -> float32. out [count]
extern "C" __global__ void from_storage(const KV_T* __restrict__ stored, float* __restrict__ out, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = to_float(stored[i]);
}
