// Copies that move bits without looking at them: simt_copy at once, cp.async when its group is waited for.
//
// A GPU may perform a cp.async at any time between its issue and its wait. Here it happens at the last moment: the target
// is poisoned and counts as unwritten at the issue, and is filled at the wait, so that no schedule hides a missing wait.
#pragma once
#include "shadow.h"

namespace simt {
constexpr int MAX_COPIES = 128, MAX_GROUPS = 16;
struct Copy {
  char* to;
  const char* from;
  int bytes, valid;
  Place place;
};
static Copy copies[MAX_THREADS][MAX_COPIES];

static bool is_in_flight(uintptr_t p) {
  for (uint32_t i = 0; i < num_threads; i++)
    for (int k = 0; k < threads[i].copies; k++)
      if (p - (uintptr_t)copies[i][k].to < (uintptr_t)copies[i][k].bytes) return true;
  return false;
}

// Where the marks of [p, p + n) are kept: null for memory whose poison is a pattern in the value itself.
static uint8_t* marks_of(const void* address, size_t n) {
  const uintptr_t p = (uintptr_t)address;
  if (p - (uintptr_t)shared_memory < SHARED_ROOM) return shared_written + (p - (uintptr_t)shared_memory);
  const Range* r = range_of(p, n, false);
  return r && r->written ? r->written + (p - r->begin) : nullptr;
}
static void copy_marks(void* to, const void* from, size_t n) {
  uint8_t* target = marks_of(to, n);
  if (!target) return;
  const uint8_t* source = marks_of(from, n);
  const Range* r = source ? nullptr : range_of((uintptr_t)from, n, false);
  for (size_t i = 0; i < n; i++)
    target[i] = source ? source[i] : !r || !first_unwritten(*r, (uintptr_t)from + i, 1);
}

static void deliver(const Copy& c) {
  if (launch.check) {
    check(c.to, (size_t)c.bytes, {true, false, CARRY}, c.place);
    copy_marks(c.to, c.from, (size_t)c.valid);
  }
  memcpy(c.to, c.from, (size_t)c.valid);
  memset(c.to + c.valid, 0, (size_t)(c.bytes - c.valid));
}
static void deliver_first(Thread& t, int count) {
  Copy* queue = copies[t.linear];
  const int left = t.copies - count;
  t.copies = 0;  // a failure below is not to be explained by these copies
  for (int i = 0; i < count; i++) deliver(queue[i]);
  memmove(queue, queue + count, sizeof(Copy) * (size_t)left);
  t.copies = left;
}
}  // namespace simt

void simt_aligned(const void* address, int bytes, const char* file, int line) {
  simt::check_aligned(address, (size_t)bytes, {__builtin_return_address(0), file, line}, "access");
}

void simt_copy(void* to, const void* from, int bytes, const char* file, int line) {
  using namespace simt;
  const Place place = {nullptr, file, line};
  const size_t n = (size_t)bytes;
  check_aligned(from, n, place, "read");
  check_aligned(to, n, place, "write");
  if (launch.check) {
    check(from, n, {false, false, CARRY}, place);
    check(to, n, {true, false, CARRY}, place);
    copy_marks(to, from, n);
  }
  memmove(to, from, n);
}

void simt_cp_async(void* shared, const void* global, int bytes, int valid, const char* file, int line) {
  using namespace simt;
  Thread& me = *current;
  const Place place = {nullptr, file, line};
  if ((bytes != 4 && bytes != 8 && bytes != 16) || valid < 0 || valid > bytes)
    fail("misaligned", place, "", "cp.async of %d bytes, %d of them valid: the hardware copies 4, 8 or 16", bytes, valid);
  check_aligned(shared, (size_t)bytes, place, "write");
  check_aligned(global, (size_t)bytes, place, "read");
  if ((uintptr_t)shared - (uintptr_t)shared_memory >= SHARED_ROOM)
    blame("out of bounds", place, (uintptr_t)shared, "cp.async to a target outside shared memory, at");
  if (me.copies == MAX_COPIES) fail("cp.async", place, "", "more than %d cp.async of one thread in flight", MAX_COPIES);
  if (launch.check) {
    if (valid) check(global, (size_t)valid, {false, false, CARRY}, place);
    check(shared, (size_t)bytes, {true, false, CARRY}, place);
    memset(marks_of(shared, (size_t)bytes), 0, (size_t)bytes);
  }
  poison(shared, (size_t)bytes);
  copies[me.linear][me.copies++] = {(char*)shared, (const char*)global, bytes, valid, place};
}
void simt_cp_commit() {
  simt::Thread& me = *simt::current;
  if (me.groups == simt::MAX_GROUPS) simt_cp_wait(simt::MAX_GROUPS - 1);
  me.group_end[me.groups++] = me.copies;
}
void simt_cp_wait(int groups_in_flight) {
  simt::Thread& me = *simt::current;
  if (me.groups <= groups_in_flight) return;
  const int finished = me.groups - groups_in_flight, count = me.group_end[finished - 1];
  for (int i = 0; i < groups_in_flight; i++) me.group_end[i] = me.group_end[finished + i] - count;
  me.groups = groups_in_flight;
  simt::deliver_first(me, count);
}
