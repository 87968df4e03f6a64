// What may be touched, by whom, and what was never written: the memory that the checked build asks about.
//
// An access is legal inside a shared array or a kernel argument. Beside each of their elements lie two Access records, the
// last write and the last reads, from which a race shows whatever the order in which fibers happen to run: two accesses
// conflict unless the same lane made both, a barrier lies between (epochs), or a chain of __syncwarp does (clocks).
//
// Uninitialised means: a shared byte that nobody wrote; an element of a global array that still holds the poison pattern;
// for arrays of single bytes, where a pattern could be data, a byte that holds it and whose mark says unwritten. A load
// of such a value is the error; simt_copy and cp.async carry it along unblamed.
#pragma once
#include "address_space.h"

namespace simt {
struct Access {
  uint32_t epoch, clock;  // clock of `lanes`
  uint32_t warps, lanes;  // who: all warps in this epoch, and the unordered lanes of the last one
  uint16_t thread;        // the last one, for the message
  uint8_t warp;
  bool atomic : 1, other_blocks : 1;
};
struct Cell {
  Access write, read;
};
static Cell* shared_cells;  // one for each byte
static Cell* cells;
static size_t num_cells;

// ---- races ------------------------------------------------------------------------------------------------------------
static bool conflicts(const Access& before, const Thread& t, bool in_shared) {
  if (before.epoch < launch_first_epoch) return false;
  if (before.epoch < block_first_epoch) return !in_shared;
  if (before.other_blocks) return true;
  if (before.epoch != epoch) return false;
  if (before.warps & ~(1u << t.warp)) return true;
  if (before.clock <= t.seen_by_all) return false;
  for (uint32_t lanes = before.lanes & ~(1u << t.lane); lanes; lanes &= lanes - 1)
    if (t.seen[__builtin_ctz(lanes)] < before.clock) return true;
  return false;
}
static void note(Access& a, const Thread& t, bool atomic, bool in_shared) {
  const bool stale = a.epoch < launch_first_epoch || (in_shared && a.epoch < block_first_epoch);
  const bool other_blocks = !stale && (a.epoch < block_first_epoch || a.other_blocks);
  const uint32_t warp = 1u << t.warp, lane = 1u << t.lane;
  if (stale || a.epoch != epoch)
    a = {epoch, t.clock, warp, lane, 0, (uint8_t)t.warp, atomic, other_blocks};
  else if (a.warp != t.warp || t.clock > a.clock)
    a = {epoch, t.clock, a.warps | warp, lane, 0, (uint8_t)t.warp, atomic && a.atomic, other_blocks};
  else {
    if (t.clock == a.clock) a.lanes |= lane;
    a.atomic = a.atomic && atomic;
  }
  a.thread = (uint16_t)t.linear;
}
__attribute__((noreturn, noinline))
static void blame_race(Place place, uintptr_t p, const Access& before, bool was_write, bool writes) {
  const Name name = name_of(p);
  const bool other_block = before.epoch < block_first_epoch || before.other_blocks;
  fail("data race", place, name.array, "%s of %s races with a %s by %s%u", writes ? "write" : "read", name.where,
       was_write ? "write" : "read", other_block ? "another block, thread " : "thread ", before.thread);
}
static void touch_cell(Cell& cell, bool writes, bool atomic, bool in_shared, uintptr_t p, Place place) {
  const Thread& t = *current;
  if (conflicts(cell.write, t, in_shared) && !(atomic && cell.write.atomic)) blame_race(place, p, cell.write, true, writes);
  if (!writes) return note(cell.read, t, false, in_shared);
  if (conflicts(cell.read, t, in_shared)) blame_race(place, p, cell.read, false, true);
  note(cell.write, t, atomic, in_shared);
}
// Neighbouring cells mostly have the same history, and then the same future.
static void touch(Cell* first, size_t count, size_t granule, bool writes, bool atomic, bool in_shared, uintptr_t p,
                  Place place) {
  const Cell before = *first;
  touch_cell(*first, writes, atomic, in_shared, p, place);
  for (size_t i = 1; i < count; i++)
    if (!memcmp(&first[i], &before, sizeof before))
      first[i] = *first;
    else
      touch_cell(first[i], writes, atomic, in_shared, p + i * granule, place);
}

// ---- initialised or not -------------------------------------------------------------------------------------------------
static inline bool holds_poison(uintptr_t p) { return *(const uint8_t*)p == (uint8_t)(p & 1 ? POISON >> 8 : POISON); }
static bool byte_is_unwritten(const Range& r, uintptr_t p) {
  if (r.written[p - r.begin] || !holds_poison(p)) return false;
  // The host's writes leave no mark, but show: one that happens to equal the pattern has a partner that does not.
  const uintptr_t partner = p ^ 1;
  return partner < r.begin || partner >= r.end || r.written[partner - r.begin] || holds_poison(partner);
}
// The first uninitialised byte of [p, p + n), or 0.
static uintptr_t first_unwritten(const Range& r, uintptr_t p, size_t n) {
  if (r.element == 1) {
    for (size_t i = 0; r.written && i < n; i++)
      if (byte_is_unwritten(r, p + i)) return p + i;
    return 0;
  }
  uintptr_t at = p - (p - r.begin) % r.element;
  for (; at < p + n; at += r.element) {
    uint64_t value = 0, pattern = 0x7fa57fa57fa57fa5ull;
    const size_t width = r.element < 8 ? r.element : 8;
    memcpy(&value, (const void*)at, width);
    if (width < 8) pattern &= ((uint64_t)1 << 8 * width) - 1;
    if (value == pattern) return at < p ? p : at;
  }
  return 0;
}

// ---- the check of one access --------------------------------------------------------------------------------------------
enum Poison { REPORT, CARRY };
struct Use {
  bool writes, atomic;
  Poison poison;
};
__attribute__((noreturn, noinline)) static void blame_bounds(Place place, uintptr_t p, size_t n, bool writes) {
  char what[64];
  snprintf(what, sizeof what, "%zu-byte %s out of bounds,", n, writes ? "write" : "read");
  blame("out of bounds", place, p, what);
}
static bool is_in_flight(uintptr_t p);
__attribute__((noreturn, noinline)) static void blame_poison(Place place, uintptr_t p) {
  const Name name = name_of(p);
  fail("uninitialised read", place, name.array, "read of uninitialised %s%s", name.where,
       is_in_flight(p) ? ", which a cp.async without a wait is to fill" : "");
}

static void check_shared(uintptr_t p, size_t n, Use use, Place place) {
  const size_t offset = p - (uintptr_t)shared_memory;
  const SharedArray* array = nullptr;
  for (int i = 0; i < num_shared_arrays && !array; i++)
    if (offset >= shared_arrays[i].offset && offset + n <= shared_arrays[i].offset + shared_arrays[i].bytes)
      array = &shared_arrays[i];
  if (!array) {
    uintptr_t outside = p;  // an access that begins inside is named by its first byte outside
    for (int i = 0; i < num_shared_arrays; i++) {
      const SharedArray& a = shared_arrays[i];
      if (offset >= a.offset && offset < a.offset + a.bytes) outside = (uintptr_t)shared_memory + a.offset + a.bytes;
    }
    blame_bounds(place, outside, n, use.writes);
  }
  touch(shared_cells + offset, n, 1, use.writes, use.atomic, true, p, place);
  if ((!use.writes || use.atomic) && use.poison == REPORT)
    if (const void* hole = memchr(shared_written + offset, 0, n))
      blame_poison(place, (uintptr_t)shared_memory + (size_t)((const uint8_t*)hole - shared_written));
  if (use.writes) memset(shared_written + offset, 1, n);
}

static const Range* range_of(uintptr_t p, size_t n, bool writes) {
  auto holds = [&](const Range& r) { return p >= r.begin && p + n <= r.end && (r.writable || !writes); };
  if (last_range < num_ranges && holds(ranges[last_range])) return &ranges[last_range];
  for (int i = 0; i < num_ranges; i++)
    if (holds(ranges[i])) return &ranges[last_range = i];
  return nullptr;
}
static void check_global(uintptr_t p, size_t n, Use use, Place place) {
  const Range* found = range_of(p, n, use.writes);
  if (!found) {
    if (range_of(p, n, false)) blame("read only", place, p, "write to the read-only argument");
    const Range* begun = range_of(p, 1, false);
    blame_bounds(place, begun ? begun->end : p, n, use.writes);
  }
  const Range& r = *found;
  if ((!use.writes || use.atomic) && use.poison == REPORT)
    if (const uintptr_t hole = first_unwritten(r, p, n)) blame_poison(place, hole);
  if (r.races) {
    const size_t first = (p - r.region) / r.granule, last = (p + n - 1 - r.region) / r.granule;
    touch(cells + r.cell + first, last - first + 1, r.granule, use.writes, use.atomic, false, p, place);
  }
  if (use.writes && r.written) memset(r.written + (p - r.begin), 1, n);
}
static void check(const void* address, size_t n, Use use, Place place) {
  const uintptr_t p = (uintptr_t)address;
  if (p - (uintptr_t)shared_memory < SHARED_ROOM)
    check_shared(p, n, use, place);
  else
    check_global(p, n, use, place);
}
static void check_aligned(const void* address, size_t n, Place place, const char* access) {
  if (!((uintptr_t)address & (n - 1))) return;
  char what[64];
  snprintf(what, sizeof what, "misaligned %zu-byte %s at", n, access);
  blame("misaligned", place, (uintptr_t)address, what);
}

// ---- shared memory of the running block ---------------------------------------------------------------------------------
static void poison(void* p, size_t n) {
  for (uintptr_t at = (uintptr_t)p; at < (uintptr_t)p + n; at++) *(uint8_t*)at = (uint8_t)(at & 1 ? POISON >> 8 : POISON);
}
static void fresh_shared_memory() {
  poison(shared_memory, shared_dirty);
  memset(shared_written, 0, shared_dirty);
  num_shared_arrays = 0;
  shared_end = shared_dirty = 0;
}
}  // namespace simt

// An array gets its place when the block's first thread meets it. Red zones lie between arrays. The dynamic array has
// the address of simt_here for its key.
void* simt_shared(const void* key, size_t bytes, size_t align, const char* name) {
  using namespace simt;
  for (int i = 0; i < num_shared_arrays; i++)
    if (shared_arrays[i].key == key) return shared_memory + shared_arrays[i].offset;
  if (align < 16) align = 16;
  const size_t offset = (shared_end + 32 + align - 1) & ~(align - 1);
  size_t total = bytes, of_static = key == &simt_here ? 0 : bytes;
  for (int i = 0; i < num_shared_arrays; i++) {
    total += shared_arrays[i].bytes;
    if (shared_arrays[i].key != &simt_here) of_static += shared_arrays[i].bytes;
  }
  const bool fits = total <= SHARED_BYTES && of_static <= STATIC_SHARED_BYTES && offset + bytes <= SHARED_ROOM;
  if (!fits || num_shared_arrays == MAX_SHARED_ARRAYS)
    fail("shared memory", {__builtin_return_address(0), nullptr, 0}, name,
         "no room for shared array '%s' (%zu bytes): %zu bytes in all, of them %zu static, where %zu and %zu fit", name, bytes,
         total, of_static, SHARED_BYTES, STATIC_SHARED_BYTES);
  shared_end = offset + bytes;
  shared_dirty = shared_end + 32;
  shared_arrays[num_shared_arrays++] = {key, name, offset, bytes};
  return shared_memory + offset;
}

void simt_atomic(void* address, int bytes, const char* file, int line) {
  using namespace simt;
  const Place place = {nullptr, file, line};
  check_aligned(address, (size_t)bytes, place, "atomic");
  if (launch.check) check(address, (size_t)bytes, {true, true, REPORT}, place);
}

void simt_fence_order() { simt::launch_first_epoch = simt::block_first_epoch; }
