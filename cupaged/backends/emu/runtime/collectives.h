// What threads do together: the block's barrier, and the warp's shuffles, votes and tensor-core instructions.
//
// A thread that arrives notes what it brings and yields. The last one that is waited for computes everybody's result and
// makes all of them ready. A kernel is expected to keep its threads to the end and to predicate instead of returning
// early, so the checked build also refuses to wait for a thread that has returned.
#pragma once
#include "schedule.h"
#include "shadow.h"

namespace simt {
static inline void wait_in(const char* what, State state, const char* file, int line) {
  current->waits_in = what;
  current->state = state;
  current->file = file;
  current->line = line;
}

// ---- the block's barrier ------------------------------------------------------------------------------------------------
static uint32_t waiting;  // threads at the barrier
static Place barrier_place;
static int barrier_sum, barrier_result, barrier_operation;
enum { ANY_OF, ALL_OF, COUNT_OF };

static void open_barrier_when_complete() {
  if (!waiting || waiting != live_threads) return;
  if (launch.check && live_threads != num_threads)
    fail("divergent barrier", barrier_place, "", "divergent __syncthreads: %u of %u threads have returned before it",
         num_threads - live_threads, num_threads);
  barrier_result = barrier_sum;
  if (barrier_operation == ANY_OF) barrier_result = barrier_sum != 0;
  if (barrier_operation == ALL_OF) barrier_result = barrier_sum == (int)waiting;
  waiting = 0;
  epoch++;
  if (launch.schedule == DEPTH) order_warps();
  for (uint32_t i = 0; i < num_threads; i++)
    if (threads[i].state == AT_BARRIER) make_ready(threads[i].warp, 1u << threads[i].lane);
}
}  // namespace simt

int simt_barrier(int predicate, int operation, const char* file, int line) {
  using namespace simt;
  const Place place = {nullptr, file, line};
  if (!waiting) {
    barrier_place = place;
    barrier_sum = 0;
    barrier_operation = operation;
  } else if (barrier_place.line != line || strcmp(barrier_place.file, file) != 0) {
    fail("divergent barrier", place, "", "divergent __syncthreads: other threads of the block wait at %s:%d",
         barrier_place.file, barrier_place.line);
  }
  wait_in("__syncthreads", AT_BARRIER, file, line);
  barrier_sum += predicate != 0;
  waiting++;
  open_barrier_when_complete();
  yield();
  return barrier_result;
}

// ---- collectives of a warp ------------------------------------------------------------------------------------------------
namespace simt {
typedef void (*Finish)(Thread* lanes, uint32_t mask, int a, int b);
struct Group {  // lanes that wait for each other
  uint32_t mask, arrived;
  Finish finish;
  int a, b;
  const char* what;
};
struct Warp {
  uint32_t live, pending;  // lanes; groups that somebody waits in
  Group groups[WARP];
};
static Warp warps[MAX_WARPS];

static void finish_group(uint32_t warp, Group& group) {
  warps[warp].pending &= ~(1u << (&group - warps[warp].groups));
  group.finish(&threads[warp * WARP], group.arrived, group.a, group.b);
  make_ready(warp, group.arrived);
}
static Group* pending_group(Warp& warp, uint32_t mask) {
  for (uint32_t rest = warp.pending; rest; rest &= rest - 1)
    if (warp.groups[__builtin_ctz(rest)].mask == mask) return &warp.groups[__builtin_ctz(rest)];
  return nullptr;
}
static Group& open_group(Warp& warp, const Group& group) {
  const int i = __builtin_ctz(~warp.pending);  // there is a free one: each holds a lane, and the caller is in none
  warp.pending |= 1u << i;
  return warp.groups[i] = group;
}
static void refuse_departed(const Group& group, uint32_t departed, Place place) {
  if (launch.check && departed)
    fail("warp mask", place, "", "%s with mask 0x%08x waits for lane %d, which has returned", group.what, group.mask,
         __builtin_ctz(departed));
}
static void collective(uint32_t mask, const char* what, Finish finish, int a, int b, const char* file, int line) {
  Thread& me = *current;
  Warp& warp = warps[me.warp];
  const Place place = {nullptr, file, line};
  if (!(mask >> me.lane & 1))
    fail("warp mask", place, "", "lane %u calls %s with mask 0x%08x, which does not name it", me.lane, what, mask);
  Group* pending = pending_group(warp, mask);
  if (pending && (pending->finish != finish || pending->a != a || pending->b != b))
    fail("warp mask", place, "", "%s meets a different %s of the same warp and mask 0x%08x", what, pending->what, mask);
  Group& group = pending ? *pending : open_group(warp, {mask, 0, finish, a, b, what});
  wait_in(what, IN_COLLECTIVE, file, line);
  me.mask = mask;
  group.arrived |= 1u << me.lane;
  const uint32_t here = num_threads - me.warp * WARP, exist = here >= WARP ? FULL : (1u << here) - 1;
  refuse_departed(group, mask & exist & ~warp.live, place);
  if (group.arrived == (mask & warp.live)) finish_group(me.warp, group);
  yield();
}

// The current thread's kernel has returned: nobody waits for it any longer.
static void leave_block() {
  Thread& me = *current;
  Warp& warp = warps[me.warp];
  me.state = DONE;
  live_threads--;
  warp.live &= ~(1u << me.lane);
  for (uint32_t rest = warp.pending; rest; rest &= rest - 1) {
    Group& group = warp.groups[__builtin_ctz(rest)];
    const Thread& waits = threads[me.warp * WARP + __builtin_ctz(group.arrived)];
    refuse_departed(group, group.mask & 1u << me.lane, {nullptr, waits.file, waits.line});
    if (group.arrived == (group.mask & warp.live)) finish_group(me.warp, group);
  }
  open_barrier_when_complete();
}

template <class F> static inline void for_lanes(uint32_t mask, F&& f) {
  for (uint32_t rest = mask; rest; rest &= rest - 1) f(__builtin_ctz(rest));
}

// Every lane of the mask now comes after all that any of them did or knew of.
static void join_clocks(Thread* lanes, uint32_t mask, int, int) {
  uint32_t latest = 0, seen[WARP] = {};
  for_lanes(mask, [&](int l) {
    if (lanes[l].clock > latest) latest = lanes[l].clock;
    for (int k = 0; k < WARP; k++)
      if (lanes[l].seen[k] > seen[k]) seen[k] = lanes[l].seen[k];
  });
  for_lanes(mask, [&](int l) { seen[l] = latest; });
  uint32_t all = latest;
  for (uint32_t k = 0; k < WARP; k++)
    if (seen[k] < all) all = seen[k];
  for_lanes(mask, [&](int l) {
    memcpy(lanes[l].seen, seen, sizeof seen);
    lanes[l].seen_by_all = all;
    lanes[l].clock = latest + 1;
  });
}

constexpr int NO_LANE = -1;
static void exchange(Thread* lanes, uint32_t mask, int kind, int width) {
  for_lanes(mask, [&](int l) {
    const int first = l & -width, s = lanes[l].source;
    int from = l - s;
    if (kind == SHUFFLE) from = first + (s & (width - 1));
    if (kind == SHUFFLE_XOR) from = l ^ s;
    if (kind == SHUFFLE_DOWN) from = l + s;
    // A lane whose source is out of its segment keeps its own value.
    if (from < 0 || from >= first + width || (kind == SHUFFLE_UP && from < first)) from = l;
    lanes[l].result = lanes[from].value;
    lanes[l].missing = mask >> from & 1 ? NO_LANE : from;
  });
}
static void count_votes(Thread* lanes, uint32_t mask, int kind, int) {
  uint32_t yes = 0;
  for_lanes(mask, [&](int l) { yes |= (uint32_t)(lanes[l].value != 0) << l; });
  const uint32_t result = kind == ANY ? yes != 0 : kind == ALL ? yes == mask : yes;
  for_lanes(mask, [&](int l) { lanes[l].result = result; });
}

// ---- tensor cores ---------------------------------------------------------------------------------------------------------
// Fragments of mma.m16n8k16 as the PTX manual draws them: lane = 4 * group + t; register i holds two neighbouring columns.
//   A (16 x 16)  row = group + 8 * (register & 1),  column = 2 t + half + 8 * (register >> 1)
//   B (16 x 8)   row = 2 t + half + 8 * register,   column = group
//   C, D (16 x 8) row = group + 8 * (i >> 1),       column = 2 t + (i & 1)
struct MmaOperands {
  float* d;
  const uint32_t *a, *b;
  const float* c;
};
static void multiply(Thread* lanes, uint32_t mask, int bf16, int) {
  float a[16][16] = {}, b[16][8] = {}, d[16][8] = {};
  auto half_of = [bf16](uint32_t two, int half) {
    const uint16_t h = (uint16_t)(half ? two >> 16 : two);
    return bf16 ? from_bf16(h) : from_half(h);
  };
  for_lanes(mask, [&](int l) {
    const MmaOperands& o = *(const MmaOperands*)lanes[l].operand;
    const int group = l >> 2, t = l & 3;
    for (int i = 0; i < 8; i++) a[group + (i >> 1 & 1) * 8][2 * t + (i & 1) + (i >> 2) * 8] = half_of(o.a[i >> 1], i & 1);
    for (int i = 0; i < 4; i++) b[2 * t + (i & 1) + (i >> 1) * 8][group] = half_of(o.b[i >> 1], i & 1);
    for (int i = 0; i < 4; i++) d[group + (i >> 1) * 8][2 * t + (i & 1)] = o.c[i];
  });
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 16; k++)
      for (int j = 0; j < 8; j++) d[i][j] += a[i][k] * b[k][j];
  for_lanes(mask, [&](int l) {
    float* out = ((const MmaOperands*)lanes[l].operand)->d;
    for (int i = 0; i < 4; i++) out[i] = d[(l >> 2) + (i >> 1) * 8][2 * (l & 3) + (i & 1)];
  });
}

// ldmatrix: lanes 8 i to 8 i + 7 bring the rows of matrix i (8 x 8 of 16 bits); lane l gets two neighbours of row l / 4.
struct LdmatrixOperands {
  uint32_t* r;
  const void* row;
};
static void load_matrices(Thread* lanes, uint32_t mask, int matrices, int transposed) {
  for (int i = 0; i < matrices; i++) {
    uint16_t m[8][8] = {};
    for (int k = 0; k < 8; k++)
      if (mask >> (i * 8 + k) & 1) memcpy(m[k], ((const LdmatrixOperands*)lanes[i * 8 + k].operand)->row, 16);
    for_lanes(mask, [&](int l) {
      const int row = l >> 2, column = (l & 3) * 2;
      const uint32_t low = transposed ? m[column][row] : m[row][column];
      const uint32_t high = transposed ? m[column + 1][row] : m[row][column + 1];
      ((const LdmatrixOperands*)lanes[l].operand)->r[i] = low | high << 16;
    });
  }
}
}  // namespace simt

void simt_syncwarp(unsigned mask, const char* file, int line) {
  simt::collective(mask, "__syncwarp", simt::join_clocks, 0, 0, file, line);
}
uint64_t simt_shuffle(unsigned mask, uint64_t value, int source, int kind, int width, const char* file, int line) {
  using namespace simt;
  static const char* const names[] = {"__shfl_sync", "__shfl_xor_sync", "__shfl_down_sync", "__shfl_up_sync"};
  Thread& me = *current;
  if (width < 1 || width > WARP || (width & (width - 1)))
    fail("warp mask", {nullptr, file, line}, "", "%s: its width %d is not a power of two up to 32", names[kind], width);
  me.value = value;
  me.source = source;
  collective(mask, names[kind], exchange, kind, width, file, line);
  if (me.missing != NO_LANE)
    fail("warp mask", {nullptr, file, line}, "", "%s reads lane %d, which is not in mask 0x%08x or has returned", names[kind],
         me.missing, mask);
  return me.result;
}
unsigned simt_vote(unsigned mask, int predicate, int kind, const char* file, int line) {
  static const char* const names[] = {"__ballot_sync", "__any_sync", "__all_sync"};
  simt::current->value = predicate != 0;
  simt::collective(mask, names[kind], simt::count_votes, kind, 0, file, line);
  return (unsigned)simt::current->result;
}
void simt_mma(int bf16, float* d, const uint32_t* a, const uint32_t* b, const float* c, const char* file, int line) {
  simt::MmaOperands operands = {d, a, b, c};
  simt::current->operand = &operands;
  simt::collective(simt::FULL, "mma.sync", simt::multiply, bf16, 0, file, line);
}
void simt_ldmatrix(int matrices, int transposed, uint32_t* r, const void* row, const char* file, int line) {
  using namespace simt;
  if ((int)current->lane < 8 * matrices) {
    const Place place = {nullptr, file, line};
    check_aligned(row, 16, place, "read");
    if ((uintptr_t)row - (uintptr_t)shared_memory >= SHARED_ROOM)
      blame("out of bounds", place, (uintptr_t)row, "ldmatrix of a row outside shared memory, at");
    if (launch.check) check(row, 16, {false, false, REPORT}, place);
  }
  LdmatrixOperands operands = {r, row};
  current->operand = &operands;
  collective(FULL, "ldmatrix", load_matrices, matrices, transposed, file, line);
}
