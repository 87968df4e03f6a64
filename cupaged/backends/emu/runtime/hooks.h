// The compiler's sanitizers, answered by this runtime: libtsan and libubsan are never linked.
//
// -fsanitize=thread makes the compiler call __tsan_readN and __tsan_writeN before each access of N bytes, -fsanitize=
// bounds, alignment, signed-integer-overflow, shift and integer-divide-by-zero call __ubsan_handle_*_abort with a place.
#pragma once
#include "shadow.h"

namespace simt {
static inline void on_access(const void* address, size_t n, bool writes, bool aligned, const void* code) {
  if (!current || !launch.check || is_private(address)) return;
  const Place place = {code, nullptr, 0};
  if (aligned) check_aligned(address, n, place, writes ? "write" : "read");
  check(address, n, {writes, false, REPORT}, place);
}
}  // namespace simt

#define SIMT_HOOK(name, n, writes, aligned) \
  SIMT_EXPORTED void __tsan_##name(void* p) { simt::on_access(p, n, writes, aligned, __builtin_return_address(0)); }
#define SIMT_HOOKS(n)                              \
  SIMT_HOOK(read##n, n, false, true)               \
  SIMT_HOOK(write##n, n, true, true)               \
  SIMT_HOOK(unaligned_read##n, n, false, false)    \
  SIMT_HOOK(unaligned_write##n, n, true, false)
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)
SIMT_EXPORTED void __tsan_read_range(void* p, size_t n) { simt::on_access(p, n, false, false, __builtin_return_address(0)); }
SIMT_EXPORTED void __tsan_write_range(void* p, size_t n) { simt::on_access(p, n, true, false, __builtin_return_address(0)); }
SIMT_EXPORTED void __tsan_init() {}
SIMT_EXPORTED void __tsan_func_entry(void*) {}
SIMT_EXPORTED void __tsan_func_exit() {}
SIMT_EXPORTED void __tsan_vptr_update(void**, void*) {}
SIMT_EXPORTED void __tsan_vptr_read(void**) {}
SIMT_EXPORTED void* __tsan_memcpy(void* to, const void* from, size_t n) {
  simt::on_access(from, n, false, false, __builtin_return_address(0));
  simt::on_access(to, n, true, false, __builtin_return_address(0));
  return memcpy(to, from, n);
}
SIMT_EXPORTED void* __tsan_memmove(void* to, const void* from, size_t n) {
  simt::on_access(from, n, false, false, __builtin_return_address(0));
  simt::on_access(to, n, true, false, __builtin_return_address(0));
  return memmove(to, from, n);
}
SIMT_EXPORTED void* __tsan_memset(void* to, int value, size_t n) {
  simt::on_access(to, n, true, false, __builtin_return_address(0));
  return memset(to, value, n);
}

namespace simt {
struct SourceLocation {  // what UBSan's data begins with
  const char* file;
  uint32_t line, column;
};
}  // namespace simt
#define SIMT_UNDEFINED(handler, kind, text)                                                                         \
  SIMT_EXPORTED __attribute__((noreturn)) void __ubsan_handle_##handler##_abort(const simt::SourceLocation* at, ...) { \
    simt::fail(kind, {__builtin_return_address(0), at->file, (int)at->line}, "", text);                               \
  }
SIMT_UNDEFINED(out_of_bounds, "out of bounds", "index past the end of an array of known size")
SIMT_UNDEFINED(shift_out_of_bounds, "overflow", "shift by more bits than the type has, or of a negative number")
SIMT_UNDEFINED(add_overflow, "overflow", "signed overflow in +")
SIMT_UNDEFINED(sub_overflow, "overflow", "signed overflow in -")
SIMT_UNDEFINED(mul_overflow, "overflow", "signed overflow in *: widen to int64_t before multiplying")
SIMT_UNDEFINED(negate_overflow, "overflow", "signed overflow in negation")
SIMT_UNDEFINED(divrem_overflow, "overflow", "division by zero, or its signed overflow")

SIMT_EXPORTED __attribute__((noreturn))
void __ubsan_handle_type_mismatch_v1_abort(const simt::SourceLocation* at, const void* p) {
  const simt::Place place = {__builtin_return_address(0), at->file, (int)at->line};
  if (!p) simt::fail("out of bounds", place, "", "access through a null pointer");
  simt::blame("misaligned", place, (uintptr_t)p, "misaligned access at");
}

__attribute__((noinline)) void simt_index_overflow(uint64_t a, int64_t b) {
  simt::fail("overflow", {__builtin_return_address(0), nullptr, 0}, "",
             "unsigned overflow in %llu * %lld: widen to int64_t before multiplying", (unsigned long long)a, (long long)b);
}
int simt_int32(int64_t value, const char* file, int line) {
  if (value != (int)value)
    simt::fail("overflow", {nullptr, file, line}, "", "%lld does not fit in a 32-bit int", (long long)value);
  return (int)value;
}
