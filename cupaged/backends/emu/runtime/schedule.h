// Whose turn it is. A fiber runs until it waits; then the schedule picks among the ready ones.
//
//   forward, reverse   fair: each warp in turn runs its ready lanes, in order or in the opposite order
//   depth              unfair: the first warp of a random order runs ahead as far as it can, the order changes at barriers
//   random             any ready lane of any ready warp
//
// Only a run-ahead warp overwrites what slower ones still read, only a slow one reads what was never waited for: each of
// them finds bugs that the others miss.
#pragma once
#include "state.h"

namespace simt {
static uint32_t ready_lanes[MAX_WARPS], ready_warps;  // indexed by rank, the schedule's order of warps
static uint8_t rank_of[MAX_WARPS], warp_at[MAX_WARPS];
static int turn_rank;
static uint32_t turn_lanes;  // what is left of the warp's turn in a fair schedule

static inline uint32_t num_warps() { return (num_threads + WARP - 1) / WARP; }

static void order_warps() {
  const uint32_t n = num_warps();
  for (uint32_t i = 0; i < n; i++) warp_at[i] = (uint8_t)(launch.schedule == REVERSE ? n - 1 - i : i);
  if (launch.schedule == DEPTH)
    for (uint32_t i = n - 1; i > 0; i--) {
      const uint32_t j = random_bits() % (i + 1);
      const uint8_t swapped = warp_at[i];
      warp_at[i] = warp_at[j];
      warp_at[j] = swapped;
    }
  for (uint32_t i = 0; i < n; i++) rank_of[warp_at[i]] = (uint8_t)i;
  turn_rank = MAX_WARPS - 1;  // the turn after the last one is the first's
  turn_lanes = 0;
}

static inline void make_ready(uint32_t warp, uint32_t lanes) {
  ready_lanes[rank_of[warp]] |= lanes;
  ready_warps |= 1u << rank_of[warp];
  for (uint32_t rest = lanes; rest; rest &= rest - 1) threads[warp * WARP + __builtin_ctz(rest)].state = READY;
}

static inline int nth_bit(uint32_t mask, uint32_t n) {
  while (n--) mask &= mask - 1;
  return __builtin_ctz(mask);
}
static inline int random_bit(uint32_t mask) { return nth_bit(mask, random_bits() % (uint32_t)__builtin_popcount(mask)); }

static inline int next_rank() {
  if (launch.schedule == RANDOM) return random_bit(ready_warps);
  if (launch.schedule == DEPTH) return __builtin_ctz(ready_warps);
  if (turn_lanes &= ready_lanes[turn_rank]) return turn_rank;
  const uint32_t later = turn_rank == MAX_WARPS - 1 ? 0 : ready_warps & FULL << (turn_rank + 1);
  turn_rank = __builtin_ctz(later ? later : ready_warps);
  turn_lanes = ready_lanes[turn_rank];
  return turn_rank;
}

// The thread to run next, no longer ready; nullptr when none is.
static Thread* pick() {
  if (!ready_warps) return nullptr;
  const int rank = next_rank();
  const uint32_t lanes = ready_lanes[rank] & (launch.schedule <= REVERSE ? turn_lanes : FULL);
  int lane = __builtin_ctz(lanes);
  if (launch.schedule == REVERSE) lane = 31 - __builtin_clz(lanes);
  if (launch.schedule == RANDOM) lane = random_bit(lanes);
  turn_lanes &= ~(1u << lane);
  if (!(ready_lanes[rank] &= ~(1u << lane))) ready_warps &= ~(1u << rank);
  return &threads[warp_at[rank] * WARP + lane];
}

// The current thread waits, or ends: another one runs until this one is ready and picked.
static void yield() {
  Thread* me = current;
  Thread* next = pick();
  if (next == me)
    me->state = RUNNING;
  else
    run(me, next);
}
}  // namespace simt
