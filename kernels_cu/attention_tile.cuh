// Attention of one warp on tensor cores: 16 query rows against a tile of keys and values in shared memory.
//
//   S [16 x positions] = Q [16 x HEAD_DIM] K^T
//   P = 2^(S * scale - m), the maximum m and the sum l brought up to date (online softmax, arXiv 1805.02867)
//   O [16 x HEAD_DIM] += P V
//
// Q stays in registers; P goes from accumulator to operand without leaving them, since both have the same layout. Lane l
// holds rows l / 4 and l / 4 + 8 ("half" 0 and 1) of S, P and O, columns l % 4 * 2 and the next one of every eight
// (PTX ISA, "Matrix Fragments for mma.m16n8k16"). All numbers of a row's softmax are in four neighbouring lanes.
//
// Keys and values lie in rows of HEAD_DIM numbers, that is HEAD_DIM / 8 chunks of 16 bytes; chunk c of row r is stored at
// c ^ (r % 8), so that eight rows of one column are in different banks.
#include "device.cuh"

constexpr int CHUNKS = HEAD_DIM / 8;
constexpr float LOG2_E = 1.4426950408889634f;

template <class type>
__device__ __forceinline__ type* chunk_at(type* tile, int row, int chunk) { return tile + row * HEAD_DIM + (chunk ^ row % 8) * 8; }

struct Query {
  unsigned at[HEAD_DIM / 16][4];
};

struct State {
  float out[HEAD_DIM / 8][4], m[2], l[2];
};

__device__ __forceinline__ void clear(State& state) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    state.m[half] = minus_infinity();
    state.l[half] = 0.0f;
  }
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 8; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) state.out[n][i] = 0.0f;
  }
}

// `row_at(r)` is the address of query row r of the warp, or null for a row of zeros.
template <class RowAt>
__device__ __forceinline__ void load_query(Query& query, RowAt row_at) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const KV_T* const row = row_at(lane / 4 + 8 * half);
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
#pragma unroll
      for (int i = 0; i < 2; i++) query.at[k][2 * i + half] = row ? load_pair(row + k * 16 + i * 8 + lane % 4 * 2) : 0u;
    }
  }
}

// Positions begin .. begin + `positions` - 1 of the context. Rows of half h see oldest[h] .. newest[h].
template <int positions>
__device__ __forceinline__ void attend(
    const Query& query, const KV_T* keys, const KV_T* values, int begin, const int (&oldest)[2], const int (&newest)[2], float scale, State& state) {
  const int lane = threadIdx.x % 32;
  float score[positions / 8][4];
#pragma unroll
  for (int n = 0; n < positions / 8; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) score[n][i] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; k++) {
#pragma unroll
    for (int n = 0; n < positions / 8; n += 2) {
      unsigned key[4];
      load_matrices_x4(key, chunk_at(keys, n * 8 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
      mma_m16n8k16<KV_T>(score[n], query.at[k], key);
      mma_m16n8k16<KV_T>(score[n + 1], query.at[k], key + 2);
    }
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    float largest = minus_infinity();
#pragma unroll
    for (int i = 0; i < positions / 4; i++) {
      float& s = score[i / 2][2 * half + i % 2];
      const int position = begin + i / 2 * 8 + lane % 4 * 2 + i % 2;
      s = position >= oldest[half] && position <= newest[half] ? s * scale : minus_infinity();
      largest = fmaxf(largest, s);
    }
    const float new_m = fmaxf(state.m[half], reduce_lanes<Max, 4>(largest));
    const float reference = new_m == minus_infinity() ? 0.0f : new_m;  // a row that has seen nothing yet: all weights 0
    const float shrink = exp2f(state.m[half] - reference);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < positions / 4; i++) {
      float& s = score[i / 2][2 * half + i % 2];
      s = exp2f(s - reference);
      sum += s;
    }
    state.m[half] = new_m;
    state.l[half] = state.l[half] * shrink + reduce_lanes<Sum, 4>(sum);
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) {
      state.out[n][2 * half] *= shrink;
      state.out[n][2 * half + 1] *= shrink;
    }
  }

#pragma unroll
  for (int k = 0; k < positions / 16; k++) {
    const float(&left)[4] = score[2 * k], (&right)[4] = score[2 * k + 1];
    const unsigned weights[4] = {
        pair_of<KV_T>(left[0], left[1]), pair_of<KV_T>(left[2], left[3]), pair_of<KV_T>(right[0], right[1]), pair_of<KV_T>(right[2], right[3])};
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n += 2) {
      unsigned value[4];
      load_matrices_x4_transposed(value, chunk_at(values, k * 16 + lane / 8 % 2 * 8 + lane % 8, n + lane / 16));
      mma_m16n8k16<KV_T>(state.out[n], weights, value);
      mma_m16n8k16<KV_T>(state.out[n + 1], weights, value + 2);
    }
  }
}
