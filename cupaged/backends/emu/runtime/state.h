// What the runtime knows: one launch, its running block, the block's threads, and the first failure.
//
// Everything is global: one operating-system thread runs a launch, and the Python side lets one in at a time.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "fiber.h"
#include "simt.h"

#define SIMT_EXPORTED extern "C" __attribute__((visibility("default")))

simt::Here simt_here;

namespace simt {
constexpr int MAX_THREADS = 1024, WARP = 32, MAX_WARPS = MAX_THREADS / WARP;
constexpr uint16_t POISON = 0x7fa5;  // repeated, a NaN as fp32, fp16 and bf16 and a wild int32
constexpr uint32_t FULL = 0xffffffffu;

enum State : uint8_t { READY, RUNNING, AT_BARRIER, IN_COLLECTIVE, DONE };

// One CUDA thread. `clock` and `seen` order the accesses of a warp's lanes: a lane's clock moves at each __syncwarp, and
// seen[l] is the latest clock of lane l whose accesses came before this lane's next one.
struct Thread {
  void* stack;
  uint3 index;
  uint32_t linear, lane, warp, clock, seen_by_all;
  State state;
  const char *waits_in, *file;
  int line;
  uint32_t mask;                  // of the collective that it waits in
  uint64_t value, result;         // what a shuffle or a vote gives and gets
  int source, missing;            // the lane that a shuffle names; and the one that is not there, or NO_LANE
  void* operand;                  // of mma and ldmatrix
  int copies, groups, group_end[16];
  uint32_t seen[WARP];
};

enum Schedule : uint32_t { FORWARD, REVERSE, DEPTH, RANDOM };
struct Launch {  // mirrored in launch.py
  uint32_t grid[3], block[3];
  uint32_t dynamic_bytes, schedule, seed, check;
};

struct Failure {  // mirrored in launch.py
  char kind[32], what[512], array[64], file[256];
  const void* address;  // of the code, or null
  int32_t line;
  uint32_t block[3], thread[3];
};

struct Place {  // in the kernel: the code's address tells more (where a function was inlined) but needs addr2line
  const void* code;
  const char* file;
  int line;
};

static Launch launch;
static Failure failure;
static bool failed;
static Thread threads[MAX_THREADS];
static Thread* current;
static void* main_stack;
static uint32_t num_threads, live_threads;
// Barrier epochs count up over all blocks and launches: equal means unordered but for the warp's clocks, older than the
// block's first means another block, older than the launch's first means ordered whatever it was.
static uint32_t epoch, block_first_epoch, launch_first_epoch;
static uint64_t random_state;

static inline uint32_t random_bits() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)(random_state >> 11);
}

// Gives the processor to `to`; nullptr is the launch loop itself.
static void run(Thread* from, Thread* to) {
  void** save = from ? &from->stack : &main_stack;
  if (to) {
    to->state = RUNNING;
    current = to;
    simt_here.thread = &to->index;
  }
  switch_stack(save, to ? to->stack : main_stack);
}

static void record_failure(const char* kind, Place place, const char* array, const char* format, va_list values) {
  if (failed) return;
  failed = true;
  memset(&failure, 0, sizeof failure);
  snprintf(failure.kind, sizeof failure.kind, "%s", kind);
  vsnprintf(failure.what, sizeof failure.what, format, values);
  snprintf(failure.array, sizeof failure.array, "%s", array);
  if (place.file) snprintf(failure.file, sizeof failure.file, "%s", place.file);
  failure.line = place.line;
  failure.address = place.code;
  const uint3 t = current ? current->index : uint3{0, 0, 0};
  const uint32_t at[6] = {simt_here.block.x, simt_here.block.y, simt_here.block.z, t.x, t.y, t.z};
  memcpy(failure.block, at, sizeof failure.block);
  memcpy(failure.thread, at + 3, sizeof failure.thread);
}

// Notes the first failure and leaves the launch: the other fibers are simply not resumed.
__attribute__((noreturn, noinline, format(printf, 4, 5)))
static void fail(const char* kind, Place place, const char* array, const char* format, ...) {
  va_list values;
  va_start(values, format);
  record_failure(kind, place, array, format, values);
  va_end(values);
  current->state = DONE;
  run(current, nullptr);
  __builtin_unreachable();
}
}  // namespace simt
