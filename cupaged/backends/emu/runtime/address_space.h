// The memory that a kernel may touch: shared arrays, its arguments, and what is private; and how an error names a place.
#pragma once
#include <sys/mman.h>

#include "state.h"

namespace simt {
constexpr size_t SHARED_BYTES = 227 * 1024, STATIC_SHARED_BYTES = 48 * 1024;  // of a block, on the largest GPUs
constexpr size_t SHARED_ROOM = SHARED_BYTES + 16 * 1024;                     // with red zones
constexpr size_t SHARED_GUARD = (size_t)64 << 20;                            // nobody may touch it: before and after
constexpr int MAX_SHARED_ARRAYS = 64;

struct SharedArray {
  const void* key;
  const char* name;
  size_t offset, bytes;
};
struct Range {  // one kernel argument; mirrored in launch.py
  uintptr_t begin, end;
  const char* name;
  uint8_t* written;   // one mark a byte, for single-byte elements of known history; else null
  uintptr_t region;   // where the union of the overlapping arguments begins: they share their cells
  uint64_t cell;      // index of the region's first cell
  uint32_t element;   // bytes
  uint32_t granule;   // bytes a cell
  uint32_t writable, races;
};

static char* shared_memory;
static uint8_t* shared_written;
static SharedArray shared_arrays[MAX_SHARED_ARRAYS];
static int num_shared_arrays;
static size_t shared_end, shared_dirty = SHARED_ROOM;

static const Range* ranges;
static int num_ranges, last_range;
static const char *image_begin, *image_end;  // the kernel library, with the kernels' constants
static char* stacks;
static size_t stack_bytes;
extern "C" {
extern char __ehdr_start __attribute__((visibility("hidden")));  // the linker's marks round this library: threadIdx is in it
extern char _end __attribute__((visibility("hidden")));
}

// A thread's own variables, and what the program itself consists of: nothing to check.
static inline bool is_private(const void* p) {
  auto within = [p](const char* begin, const char* end) { return (const char*)p >= begin && (const char*)p < end; };
  return within(stacks, stacks + stack_bytes * MAX_THREADS) || within(&__ehdr_start, &_end) || within(image_begin, image_end);
}

template <class T> static T* reserve(size_t count) {
  void* p = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : (T*)p;
}

// ---- naming an address ------------------------------------------------------------------------------------------------
struct Name {
  char array[64], where[160];
};
static void name_shared(uintptr_t p, Name& name) {
  const ptrdiff_t at_or_before = (ptrdiff_t)(p - (uintptr_t)shared_memory);
  const size_t offset = at_or_before < 0 ? 0 : (size_t)at_or_before;
  const SharedArray* before = nullptr;
  for (int i = 0; i < num_shared_arrays; i++) {
    const SharedArray& a = shared_arrays[i];
    if (offset >= a.offset && (!before || a.offset > before->offset)) before = &a;
  }
  if (!before || at_or_before < 0) {
    snprintf(name.where, sizeof name.where, "shared memory before every array");
    return;
  }
  snprintf(name.array, sizeof name.array, "%s", before->name);
  const size_t at = offset - before->offset;
  if (at < before->bytes)
    snprintf(name.where, sizeof name.where, "shared array '%s' (byte %zu of %zu)", before->name, at, before->bytes);
  else
    snprintf(name.where, sizeof name.where, "%zu bytes past the end of shared array '%s' (%zu bytes)", at - before->bytes,
             before->name, before->bytes);
}
static Name name_of(uintptr_t p) {
  Name name = {};
  if (p - (uintptr_t)shared_memory + SHARED_GUARD < SHARED_ROOM + 2 * SHARED_GUARD) {
    name_shared(p, name);
    return name;
  }
  uintptr_t best = (uintptr_t)1 << 40;
  for (int i = 0; i < num_ranges && best; i++) {
    const Range& r = ranges[i];
    const bool before = p < r.begin, past = p >= r.end;
    const uintptr_t distance = before ? r.begin - p : past ? p - r.end : 0;
    if (distance >= best && distance) continue;
    best = distance;
    snprintf(name.array, sizeof name.array, "%s", r.name);
    if (before || past)
      snprintf(name.where, sizeof name.where, "%zu bytes %s '%s' (%zu bytes)", (size_t)distance,
               before ? "before the start of" : "past the end of", r.name, (size_t)(r.end - r.begin));
    else
      snprintf(name.where, sizeof name.where, "'%s' (element %zu of %zu)", r.name, (size_t)(p - r.begin) / r.element,
               (size_t)(r.end - r.begin) / r.element);
  }
  if (!name.array[0]) snprintf(name.where, sizeof name.where, "wild address %p", (void*)p);
  return name;
}

__attribute__((noreturn, noinline))
static void blame(const char* kind, Place place, uintptr_t p, const char* what) {
  const Name name = name_of(p);
  fail(kind, place, name.array, "%s %s", what, name.where);
}
}  // namespace simt
